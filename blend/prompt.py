"""Prompts: the model's own chat template split into an exact prefix and a suffix, with the chunks between them.

Segments are tokenised one by one and joined as ids, so that a chunk has the same ids in every prompt and every method in a
comparison sees the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from blend.config import PromptConfig
from blend.errors import PromptError
from blend.types import PromptLayout

# A private-use character: no template contains or changes it.
_MARK = "\ue000"


class TextChunk(Protocol):
    """What a prompt needs to know of a chunk."""

    @property
    def title(self) -> str:
        """Heading under which the text stands; may be empty."""
        ...

    @property
    def text(self) -> str:
        """The chunk's own text."""
        ...


def render_chunk(chunk: TextChunk) -> str:
    """A chunk as it stands in the prompt: its title on a line, its text, a blank line."""
    title = f"{chunk.title}\n" if chunk.title else ""
    return f"{title}{chunk.text.strip()}\n\n"


class PromptTemplate:
    """Turns a question and chunks into a `PromptLayout`.

    tokenizer: a HuggingFace tokenizer; without a chat template the prompt is plain text.
    """

    def __init__(self, tokenizer: Any, config: PromptConfig | None = None) -> None:
        self._tokenizer = tokenizer
        self.config = config or PromptConfig()
        before, after = self._around_chunks()
        self._after = after
        self.prefix = tuple(self.encode(before))
        if not self.prefix:
            raise PromptError("the prompt has no prefix: give the prompt an instruction or a system message")

    def layout(self, question: str, chunks: Sequence[TextChunk]) -> PromptLayout:
        """Token ids of the prompt. Raises `PromptError` for an empty question."""
        return self.layout_of_ids(question, [self.chunk_ids(chunk) for chunk in chunks])

    def layout_of_ids(self, question: str, chunks: Sequence[tuple[int, ...]]) -> PromptLayout:
        """The same for chunks that are token ids already."""
        if not question.strip():
            raise PromptError("the question is empty")
        return PromptLayout(self.prefix, tuple(chunks), tuple(self.encode(self._suffix(question))))

    def chunk_ids(self, chunk: TextChunk) -> tuple[int, ...]:
        """Token ids of one chunk as it stands in every prompt."""
        return tuple(self.encode(render_chunk(chunk)))

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _suffix(self, question: str) -> str:
        return self.config.question.replace("{question}", question.strip()) + self._after

    def _around_chunks(self) -> tuple[str, str]:
        """The text before the chunks and the text after the question."""
        if getattr(self._tokenizer, "chat_template", None):
            return self._split_template()
        bos = self._tokenizer.bos_token or ""
        return f"{bos}{self.config.system}\n\n{self.config.instruction}", "\nAnswer:"

    def _split_template(self) -> tuple[str, str]:
        user = f"{self.config.instruction}{_MARK}"
        try:
            text = self._apply([{"role": "system", "content": self.config.system}, {"role": "user", "content": user}])
        except Exception:  # some templates know no system role: it then opens the user's turn
            text = self._apply([{"role": "user", "content": f"{self.config.system}\n\n{user}"}])
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise PromptError(
                "the model's chat template drops the user's message; pass a tokenizer with a usable template"
            )
        return before, after

    def _apply(self, messages: list[dict[str, str]]) -> str:
        # Reasoning models answer directly: a chain of thought in front would be measured as the answer.
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        )
