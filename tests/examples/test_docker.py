"""The container of examples/docker without Docker: linters read its files, and its steps run in a fresh folder."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from compose_spec import PyCompose
from example_server import until
from places import REPOSITORY, free_port

from tests import towns
from tests.tiny_model import save_tiny_model

FOLDER = REPOSITORY / "examples" / "docker"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
STEPS = re.findall(r"^([A-Z]+) (.*)$", re.sub(r"\\\n\s*", "", DOCKERFILE), re.MULTILINE)
PORT = "8000"


def arguments(instruction: str) -> list[str]:
    """What the Dockerfile says behind each instruction of this name."""
    return [argument for name, argument in STEPS if name == instruction]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Dockerfile's copies and the package installed from them, without its requirements."""
    root = tmp_path_factory.mktemp("image")
    for copied in arguments("COPY"):
        *sources, target = [word for word in shlex.split(copied) if not word.startswith("--")]
        for source in map(REPOSITORY.joinpath, sources):
            place = root / target[1:]
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place = place / source.name if target.endswith("/") else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    [install] = [step for step in arguments("RUN") if "/src" in step]
    [requirement] = re.findall(r"'/(src)\[all\]'", install)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--prefix", "usr"]
    subprocess.run([*pip, f"./{requirement}"], cwd=root, check=True, capture_output=True)
    for volume in ("cache", "data"):
        (root / volume).mkdir()
    save_tiny_model(root / "tiny", "\n".join(towns.documents().values()))
    return root


def environment(root: Path) -> dict[str, str]:
    """The Dockerfile's variables, below `root`, and the way to what is installed there."""
    [declared] = arguments("ENV")
    variables = dict(word.split("=") for word in declared.split())
    [packages] = root.glob("usr/lib/python*/site-packages")
    path = [root / "usr/local/bin", root / "usr/bin", Path(sys.executable).parent]
    return {
        **{name: f"{root}{value}" for name, value in variables.items()},
        "PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]),
        "PYTHONPATH": str(packages),
        "KVBLEND_MODEL": str(root / "tiny"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def server(image: Path) -> Iterator[tuple[Path, int]]:
    port = free_port()
    [command] = [json.loads(command) for command in arguments("CMD")]
    [work] = arguments("WORKDIR")
    env = environment(image)
    with subprocess.Popen([*command, "--port", str(port)], cwd=image / work[1:], env=env) as process:
        yield image, port
        process.terminate()
    assert process.returncode == 0


def healthy(image: Path, port: int) -> bool:
    """Whether the Dockerfile's health check passes."""
    [check] = arguments("HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2].replace(f":{PORT}/", f":{port}/"))
    return subprocess.run(command, env=environment(image), capture_output=True).returncode == 0


def test_the_image_serves_with_a_key_that_its_first_start_makes(server):
    image, port = server
    assert not healthy(image, port)  # it takes seconds to load
    until(lambda: healthy(image, port))
    url = f"http://127.0.0.1:{port}"
    keys = image / "data" / "api-keys"
    assert keys.stat().st_mode & 0o777 == 0o600
    headers = {"Authorization": f"Bearer {keys.read_text(encoding='utf-8').strip()}"}
    question = {"model": "tiny", "messages": [{"role": "user", "content": "How many gates?"}], "max_tokens": 2}
    assert httpx.post(f"{url}/v1/chat/completions", json=question).status_code == 401
    answer = httpx.post(f"{url}/v1/chat/completions", json=question, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert "kvblend_num_requests_running" in httpx.get(f"{url}/metrics", headers=headers).text
    assert httpx.get(url).status_code == 200  # the page's files are installed


def test_a_command_may_take_the_place_of_the_server(image):
    towns.write_documents(image / "documents")
    command = ["blend", "precompute", str(image / "documents"), "--quick"]
    subprocess.run(command, cwd=image / "data", env=environment(image), check=True, capture_output=True)
    assert (image / "data" / "store" / "index").is_dir()


def test_a_key_that_is_there_stays(image, tmp_path):
    (tmp_path / "api-keys").write_text("mine\n", encoding="utf-8")
    serve = ["serve", "--help"]
    subprocess.run(serve, cwd=tmp_path, env=environment(image), check=True, capture_output=True)
    assert (tmp_path / "api-keys").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize("folder", ["docker", "vllm"])
def test_the_linter_accepts_the_dockerfile(folder):
    hadolint = Path(sys.executable).with_name("hadolint")
    file = FOLDER.with_name(folder) / "Dockerfile"
    done = subprocess.run([str(hadolint), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_the_compose_files_follow_the_specification(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    compose = PyCompose.from_yaml(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text))
    compose.validate()
    service = compose.to_dict()["services"]["kvblend"]
    assert service["build"]["args"]["VARIANT"] in re.findall(r" AS torch-(\w+)", DOCKERFILE)


def test_what_vllm_runs_in_says_the_same_everywhere():
    """Compose file, manifest and Dockerfile: user, port, probes and the store's folder."""
    folder = FOLDER.with_name("vllm")
    text = (folder / "compose.yaml").read_text(encoding="utf-8")
    compose = PyCompose.from_yaml(re.sub(r"\$\{(\w+):[-?](.*?)\}", r"\2", text))
    compose.validate()
    service = compose.to_dict()["services"]["vllm"]
    dockerfile = (folder / "Dockerfile").read_text(encoding="utf-8")
    assert service["build"]["dockerfile"] == "examples/vllm/Dockerfile"
    resources = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert [one["kind"] for one in resources] == ["PersistentVolumeClaim", "Deployment", "Service"]
    pod = resources[1]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/store", "/cache"} <= mounted
    assert {volume.partition(":")[2] for volume in service["volumes"]} <= mounted
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
    assert f"EXPOSE {container['ports'][0]['containerPort']}\n" in dockerfile
    for name in ("startup", "readiness", "liveness"):
        assert container[f"{name}Probe"]["httpGet"]["path"] == "/health"


def test_alerts_are_about_metrics_that_there_are():
    source = (REPOSITORY / "blend/integrations/vllm/connector.py").read_text(encoding="utf-8")
    rules = yaml.safe_load((FOLDER.with_name("vllm") / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    for rule in rules:
        for name in re.findall(r"vllm:kvblend_(\w+)_total", rule["expr"]):
            assert f'"{name}": ' in source


def test_torch_is_the_version_that_is_tested():
    venv = (REPOSITORY / "scripts" / "venv").read_text(encoding="utf-8")
    [tested] = re.findall(r"torch_cpu='torch==(.*)\+cpu'", venv)
    assert set(re.findall(r"torch==([\d.]+)", DOCKERFILE)) == {tested}
