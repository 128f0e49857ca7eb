"""Blend passages that your own code retrieved: no index, no embedding model.

    python examples/your_own_retriever.py

Environment: KVBLEND_MODEL, a catalog name, HuggingFace id or model directory; KVBLEND_STORE, a folder for the caches.
"""

import os
from typing import NamedTuple

from blend import BlendConfig, Blender, Decoder, PromptTemplate, generate, open_store
from blend.weights import resolve_model


class Passage(NamedTuple):
    """Anything with a title and a text will do."""

    title: str
    text: str


PASSAGES = [
    Passage("Harbour", "The harbour of Port Rowan has seven gates. The oldest was built in 1672. " * 4),
    Passage("Bell", "The bell of Port Rowan weighs two tonnes and rings at noon. " * 4),
    Passage("Market", "The market of Port Rowan opens on Saturdays, from six to eleven. " * 4),
]


def main() -> None:
    """Ask the same passages in two orders; the second prompt reuses what the first computed."""
    model = os.environ.get("KVBLEND_MODEL", "qwen2.5-coder-0.5b")
    decoder = Decoder.load(str(resolve_model(model)), name=model)
    blender = Blender(decoder, open_store(os.environ.get("KVBLEND_STORE", "my-store")), BlendConfig(ratio=0.15))
    template = PromptTemplate(decoder.tokenizer)

    for passages, question in ((PASSAGES, "How many gates are there?"), (PASSAGES[::-1], "How heavy is the bell?")):
        layout = template.layout(question, passages)
        blend = blender.prefill(layout, room=16)
        answer = generate(decoder, blend, layout.token_ids, max_new_tokens=16)
        blender.remember(blend)  # computes and stores the caches that this prompt lacked
        found = sum(blend.hits)
        print(
            f"{found} of {len(passages)} chunks in the store, {blend.rows_share:.0%} of the rows computed: {answer.text}"
        )


if __name__ == "__main__":
    main()
