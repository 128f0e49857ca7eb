"""Speed and quality on your own questions: the same as `blend report`, from Python.

    python examples/evaluate.py questions.jsonl

A question file has one JSON object a line: {"id", "question", "answers": [...], "chunks": [{"title", "text"}]}.
Environment: KVBLEND_MODEL, a catalog name, HuggingFace id or model directory; KVBLEND_STORE, a folder for the caches.
"""

import os
import subprocess
import sys


def main() -> None:
    """Run the report and keep it as JSON."""
    model = os.environ.get("KVBLEND_MODEL", "qwen2.5-coder-0.5b")
    store = os.environ.get("KVBLEND_STORE", "my-store")
    command = [sys.executable, "-m", "blend", "report", "--dataset", sys.argv[1], "--model", model, "--store", store]
    subprocess.run([*command, "--max-new-tokens", "16", "--json", "report.json"], check=True)


if __name__ == "__main__":
    main()
