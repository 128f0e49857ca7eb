"""Text to token ids in which text stays text: no document, title or question ever yields a control token.

A tokenizer turns the characters `<|im_end|>` into the model's control token of that name wherever they stand, so that a
document could close the user's turn and speak as the system. Here such characters become ordinary tokens: the text is cut in
them and the pieces are tokenised apart. That works for every tokenizer, whatever it does with special tokens itself, because
the result is looked at: pieces that still yield a control token are cut further.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

_BLANKS = " \t\r\n\N{LOWER ONE EIGHTH BLOCK}"  # the last is how sentencepiece writes a space
_SUBSTITUTE = "\N{REPLACEMENT CHARACTER}"


class TextTokenizer:
    """Tokenises what a model's prompt is made of.

    tokenizer: a HuggingFace tokenizer. control: ids that text never yields: of the special tokens, and of all that were added
    to the vocabulary, but for runs of blanks and single characters, which stand for themselves.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {int(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        names = ("all_special_ids", "all_special_tokens")
        special = dict(zip(*(getattr(tokenizer, name, ()) for name in names), strict=True))
        words = {i: word for i, word in added.items() if len(word) > 1 and word.strip(_BLANKS)}
        self._contents = {**words, **special}
        self.control = frozenset(self._contents)
        self._never = self.control - self._unknown()

    def _unknown(self) -> frozenset[int]:
        """The id of what has no token, which any text may yield, unless it is the control token of something else too."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        named = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
        others = {getattr(self._tokenizer, name, None) for name in named}
        return frozenset() if unknown is None or unknown in others else frozenset({unknown})

    def template(self, text: str) -> list[int]:
        """Ids of the chat template's own text, control tokens included."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, text: str) -> list[int]:
        """Ids of anybody's text, without a control token; as the tokenizer makes them wherever that holds already."""
        ids = self.template(text)
        if self.control.isdisjoint(ids):
            return ids
        return [token for piece in self._cut(text) for token in self._checked(piece)]

    def join(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a text whose parts `(text, whether it is the template's own)` follow one another.

        In one piece, as the model was trained on it, where its control tokens are those of the template; else part by part.
        """
        whole = self.template("".join(text for text, _ in parts))
        own = [token for text, trusted in parts if trusted for token in self.template(text) if token in self.control]
        if [token for token in whole if token in self.control] == own:
            return whole
        return [token for text, trusted in parts for token in (self.template(text) if trusted else self.text(text))]

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """Where a control token is spelled out, overlaps included, the longest first."""
        words = sorted(filter(None, self._contents.values()), key=len, reverse=True)
        return re.compile(f"(?=({'|'.join(map(re.escape, words))}))" if words else r"(?!)")

    def _cut(self, text: str) -> Iterator[str]:
        """The text cut after the first character of every control token that is spelled out in it."""
        cuts = (match.start() + 1 for match in self._spelled.finditer(text))
        yield from (text[start:stop] for start, stop in pairwise((0, *cuts, len(text))) if stop > start)

    def _checked(self, text: str) -> list[int]:
        """Ids of a piece; cut in halves where it yields a control token without spelling it out, as normalisers make of it."""
        ids = self.template(text)
        if self._never.isdisjoint(ids):
            return ids
        if len(text) < 2:
            return [token for token in self.template(_SUBSTITUTE) if token not in self._never]
        middle = len(text) // 2
        return self._checked(text[:middle]) + self._checked(text[middle:])
