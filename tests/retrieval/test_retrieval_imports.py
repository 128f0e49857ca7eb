from pathlib import Path

from places import run_python

import blend_retrieval

ROOT = Path(blend_retrieval.__file__).resolve().parent
HEAVY = {
    "torch", "transformers", "faiss", "sentence_transformers", "numpy",
    "selectolax", "html_to_markdown", "docutils", "pypdfium2", "mammoth", "pptx", "openpyxl", "arro3", "chardet", "yaml",
    "markdown_it", "semantic_text_splitter", "filelock", "blend", "blend_kernels",
}  # fmt: skip


def test_no_module_loads_a_library_when_it_is_imported():
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")]
    script = (
        "import sys, importlib\n"
        f"[importlib.import_module(name.removesuffix('.__init__')) for name in {names!r}]\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    run = run_python(script)
    assert run.stdout.strip() == "[]", run.stderr
