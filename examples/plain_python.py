"""Precompute the documents of a folder, then answer a question, blended and with full prefill.

    python examples/plain_python.py docs/ "How do I choose a ratio?"

Environment: KVBLEND_MODEL, a catalog name, HuggingFace id or model directory; KVBLEND_STORE, a folder for the caches.
"""

import os
import sys

from blend import Rag


def main() -> None:
    """Ask one question."""
    folder, question = sys.argv[1], sys.argv[2]
    rag = Rag(os.environ.get("KVBLEND_STORE", "my-store"), model=os.environ.get("KVBLEND_MODEL", "qwen2.5-coder-0.5b"))
    done = rag.precompute([folder])
    print(f"{done.computed} caches computed, {done.reused} reused")

    answer = rag.answer(question, max_new_tokens=48, compare=True)
    print(answer.text)
    for hit in answer.chunks:
        print(f"  from {hit.chunk.title}")
    assert answer.full is not None
    print(f"{answer.ttft_s:.2f} s to the first token; {answer.full.ttft_s:.2f} s with full prefill")


if __name__ == "__main__":
    main()
