import subprocess
import sys
from pathlib import Path

import pytest

import blend_retrieval

ROOT = Path(blend_retrieval.__file__).resolve().parent
HEAVY = {
    "torch", "transformers", "faiss", "sentence_transformers", "numpy",
    "selectolax", "html_to_markdown", "docutils", "pypdfium2", "mammoth", "pptx", "openpyxl", "chardet", "yaml",
    "markdown_it", "semantic_text_splitter", "filelock", "blend", "blend_kernels",
}  # fmt: skip


def test_no_module_loads_a_library_when_it_is_imported():
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")]
    script = (
        f"import sys, importlib; sys.path.insert(0, {str(ROOT.parent)!r})\n"
        f"[importlib.import_module(name.removesuffix('.__init__')) for name in {names!r}]\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", blend_retrieval.__all__)
def test_every_public_name_is_there(name):
    assert getattr(blend_retrieval, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="nothing"):
        _ = blend_retrieval.nothing
