"""The dashboard for Grafana asks for metrics and labels that a real server has, and leaves out none of docs/metrics.md."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from compose_spec import PyCompose
from places import REPOSITORY
from prometheus_client.parser import text_string_to_metric_families
from served import Served

from blend.serve.metrics import StoreFigures
from blend.store.backend import TierHits

FOLDER = REPOSITORY / "examples" / "grafana"
DASHBOARD = json.loads((FOLDER / "kvblend.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"sum", "min", "rate", "increase", "histogram_quantile", "by"}
VARIABLES = {"$instance", "$__rate_interval", "$__range"}
TOKEN = re.compile(r'\s*(?:("[^"]*")|(\$\w+)|(\d+(?:\.\d+)?)|([a-zA-Z_]\w*)|(=~|[-+*/(){}\[\],=]))')
PAIRS = {")": "(", "}": "{", "]": "["}


def parsed(expression: str) -> tuple[set[str], dict[str, set[str]]]:
    """The metrics of an expression, and the labels by which each is selected or grouped. Fails for what it does not know."""
    tokens, place = [], 0
    while place < len(expression):
        token = TOKEN.match(expression, place)
        assert token, f"not understood: {expression[place:]}"
        tokens.append(token[0].strip())
        place = token.end()
    open_brackets: list[str] = []
    for token in tokens:
        if token in PAIRS.values():
            open_brackets.append(token)
        elif token in PAIRS:
            assert open_brackets, expression
            assert open_brackets.pop() == PAIRS[token], expression
    assert not open_brackets, expression
    assert set(re.findall(r"\$\w+", expression)) <= VARIABLES
    metrics = set(re.findall(r"\b((?:kvblend|process)_\w+)\{", expression))
    labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
    words = set(re.findall(r'(?<!["$\w])[a-z_]\w*(?!["\w])', re.sub(r'"[^"]*"', '""', expression)))
    assert words - {"instance"} <= FUNCTIONS | metrics | labels, expression
    return metrics, dict.fromkeys(metrics, labels - {"le"})


@pytest.fixture(scope="module")
def samples(served: Served) -> dict[str, set[str]]:
    """The labels of each metric of a server that has answered, refused, and compared."""
    served.ask()
    served.ask(max_tokens=0)
    served.send("GET", "/nowhere")
    of_shared_store = served.metrics.page(stores=StoreFigures(hits=TierHits(1, 1, 1, 1, 1))).decode()
    labels: dict[str, set[str]] = defaultdict(set)
    for text in (httpx.get(f"{served.url}/metrics").text, of_shared_store):
        for family in text_string_to_metric_families(text):
            labels[family.name if family.type != "counter" else f"{family.name}_total"].update(())
            for sample in family.samples:
                labels[sample.name].update(sample.labels)
    return labels


def documented() -> Iterator[tuple[str, set[str]]]:
    """The metrics of the table in docs/metrics.md, with their labels."""
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", row):
            yield f"kvblend_{name}", set(filter(None, labels.split(",")))


@pytest.mark.parametrize(("title", "expression", "legend"), QUERIES, ids=[query[0] for query in QUERIES])
def test_a_panel_asks_for_what_the_server_has(
    samples: dict[str, set[str]], title: str, expression: str, legend: str
) -> None:
    metrics, labels_of = parsed(expression)
    assert metrics, title
    for metric in metrics:
        assert metric in samples, f"{title}: the server has no {metric}"
        family = re.sub(r"_(bucket|sum|count)$", "", metric)
        known = samples[metric] | dict(documented()).get(family, set()) | {"instance"}
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert labels_of[metric] <= known, f"{title}: {metric} has no such label"
        assert shown <= known, f"{title}: {metric} has no label {shown}"


def test_every_metric_of_the_page_exists_and_has_a_panel(samples: dict[str, set[str]]) -> None:
    asked = " ".join(expression for _, expression, _ in QUERIES)
    for metric, labels in documented():
        names = {metric, f"{metric}_bucket"} & samples.keys()
        assert names, f"the server has no {metric}"
        assert any(f"{name}{{" in asked for name in names), f"no panel shows {metric}"
        observed = set.union(*(samples[name] for name in names)) - {"le"}
        assert observed <= labels, f"docs/metrics.md does not name the labels of {metric}"


def test_panels_lie_beside_each_other() -> None:
    places = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize(
    "expression",
    ["sum (rate(kvblend_x{}[1m])", "sum by (le) kvblend_x{])", "avg(kvblend_x{})", "kvblend_x{} / $other", "a ; b"],
)
def test_an_expression_with_a_mistake_is_noticed(expression: str) -> None:
    with pytest.raises(AssertionError):
        parsed(expression)


def test_the_files_around_it_fit_together() -> None:
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    PyCompose.from_yaml(text).validate()
    services: Any = yaml.safe_load(text)["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert mounted
    assert all((FOLDER / place).is_file() for place in mounted)
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == ["127.0.0.1:8000"], "where blend serve listens"
