"""What a codec costs: the same prompts over the same caches, kept in every codec, against full recompute.

Full recompute and the chunk caches of a record are computed once. Every codec then gets those caches, the surrogate context and
the KV corrections of one store that rounds nothing, so that whatever differs between two codecs is the codecs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.blender import Blender
from blend.chunks.library import with_surrogate
from blend.config import BlendConfig, CorpusConfig
from blend.eval.evaluator import Recorder
from blend.eval.metrics import kl_divergence, paired_interval, top1_agreement
from blend.model.decoder import full_prefill
from blend.model.generate import generate, teacher_forced_logits
from blend.prompt import PromptTemplate
from blend.store import Codec, open_store
from study.rows import append_lines, read_lines

if TYPE_CHECKING:
    from blend.eval.dataset import Record
    from blend.model.decoder import Decoder
    from blend.store import ChunkStore
    from blend.types import PromptLayout


BASE = "bfloat16"
_RUNS = 50


class Measured(NamedTuple):
    """A codec on a record. kl, top1: to full recompute, along its answer. nbytes: of the entries. tokens: in them."""

    record: str
    codec: str
    kl: float
    top1: float
    nbytes: int
    tokens: int


class Comparison:
    """Measures records.

    kept: a store that rounds nothing, for the caches and what is fitted once. apart: the records that it is fitted on; with
    none there is no surrogate context and no KV correction.
    """

    def __init__(self, decoder: Decoder, kept: ChunkStore, apart: Sequence[Record], codecs: Sequence[Codec]) -> None:
        self._decoder, self._template = decoder, PromptTemplate(decoder.tokenizer)
        self._kept = Blender(decoder, kept)
        chunks = list(dict.fromkeys(self._template.chunk_ids(chunk) for record in apart for chunk in record.chunks))
        library = self._kept.library(self._template.prefix)
        self._config = BlendConfig(correction=bool(chunks), surrogate=bool(chunks))
        if chunks and not library.decided:
            with_surrogate(library, chunks, CorpusConfig.surrogate_tokens)
        if chunks:
            self._kept.calibrate(self._template.prefix, chunks)
        self._blenders = [Blender(decoder, _with_artifacts(codec, kept)) for codec in codecs]

    def measure(self, record: Record, most: int, done: Container[str]) -> Iterator[Measured]:
        """The default blend with every codec that is not `done`, along `most` tokens of the answer at most."""
        layout = self._template.layout(record.question, record.chunks)
        self._decoder.check_length(layout.rows + most)
        full = Recorder(full_prefill(self._decoder, layout))
        answer = generate(self._decoder, full, layout.token_ids, max_new_tokens=most).token_ids
        true = torch.cat(full.seen)[: len(answer)].float()
        library = self._kept.library(layout.kept_behind)
        caches = library.caches(layout.chunks, contextual=self._config.surrogate)
        opened = library.open(layout.chunks, contextual=self._config.surrogate)
        opened.close()
        for blender in self._blenders:
            if blender.store.codec.name in done:
                continue
            mine = blender.library(layout.kept_behind)
            for one, cache in zip(opened.used, caches, strict=True):
                mine.keep(one, cache)
            logits = self._logits(blender, layout, answer)
            held = {mine.key(one): len(one.chunk) for one in opened.used}
            kl, top1 = float(kl_divergence(true, logits).mean()), top1_agreement(true, logits) or 0.0
            name, nbytes = blender.store.codec.name, blender.store.stats().nbytes
            yield Measured(record.id, name, kl, top1, nbytes, sum(held.values()))
            for key in held:
                blender.store.delete(key)

    def _logits(self, blender: Blender, layout: PromptLayout, answer: Sequence[int]) -> torch.Tensor:
        blend = blender.prefill(layout, config=self._config, room=len(answer))
        if blend.problems or blend.artifact_problems:
            raise RuntimeError("; ".join((*blend.problems, *blend.artifact_problems)))
        return teacher_forced_logits(blend, answer)


def _with_artifacts(codec: Codec, kept: ChunkStore) -> ChunkStore:
    store = open_store("memory:", codec=codec.name)
    for name in kept.artifacts():
        store.write_artifact(name, kept.read_artifact(name) or b"")
    return store


def append(path: Path, found: Iterable[Measured]) -> None:
    """Write results down."""
    append_lines(path, [one._asdict() for one in found])


def read(path: Path) -> list[Measured]:
    """What was measured so far."""
    return [Measured(**line) for line in read_lines(path)]


def table(found: Sequence[Measured], taken: Iterable[Speed] = ()) -> Iterator[str]:
    """A line a codec as Markdown, on the records that all codecs have, against bfloat16. taken: of `speeds`."""
    speed = {one.codec: one for one in taken}
    by_codec: dict[str, dict[str, Measured]] = {}
    for one in found:
        by_codec.setdefault(one.codec, {})[one.record] = one
    records = sorted(set.intersection(*(set(mine) for mine in by_codec.values())))
    base = [by_codec[BASE][record] for record in records]
    names = ["codec", "bytes a token", "of bfloat16", "mean KL", "of bfloat16", "difference", "median KL", "top-1"]
    names += ["difference", *(["encode GB/s", "decode GB/s"] if speed else [])]
    yield _cells(names)
    yield f"|---|{'--:|' * (len(names) - 1)}"
    for codec, mine in by_codec.items():
        rates = [] if not speed else _rates(speed[codec]) if codec in speed else ["", ""]
        yield _cells([*_figures(codec, [mine[record] for record in records], base), *rates])
    yield f"\n{len(records)} records"


def _figures(codec: str, mine: Sequence[Measured], base: Sequence[Measured]) -> list[str]:
    kl, other = [one.kl for one in mine], [one.kl for one in base]
    size, least = (sum(one.nbytes for one in rows) / sum(one.tokens for one in rows) for rows in (mine, base))
    more = paired_interval(kl, other)
    agree = paired_interval([one.top1 for one in mine], [one.top1 for one in base])
    return [
        *(codec, f"{size:,.0f}", f"{size / least:.3f}", f"{mean(kl):.4f}", f"{mean(kl) / mean(other):.3f}"),
        *(f"{more.mean:+.4f} [{more.low:+.4f}, {more.high:+.4f}]", f"{median(kl):.4f}"),
        *(f"{mean(one.top1 for one in mine):.3f}", f"{agree.mean:+.3f} [{agree.low:+.3f}, {agree.high:+.3f}]"),
    ]


def _rates(one: Speed) -> list[str]:
    return [f"{one.nbytes / seconds / 1e9:.2f}" for seconds in (one.encode_s, one.decode_s)]


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


class Speed(NamedTuple):
    """Seconds of one thread's computing to encode and to decode a layer, and its bytes in bfloat16 and as stored."""

    codec: str
    encode_s: float
    decode_s: float
    nbytes: int
    stored: int


def speeds(codecs: Sequence[Codec], shape: tuple[int, int, int]) -> Iterator[Speed]:
    """Of one layer `[kv_heads, tokens, head_dim]`, decoded into slices of larger float32 tensors; the fastest of warm runs."""
    heads, tokens, width = shape
    keys, values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    outs = torch.empty(2, heads, 4 * tokens, width)[:, :, tokens : 2 * tokens].unbind()
    for codec in codecs:
        parts = codec.encode(keys, values)
        stored = sum(part.numel() * part.element_size() for part in parts.values())
        encode_s = _least_s(partial(codec.encode, keys, values), _RUNS // 5)
        decode_s = _least_s(partial(codec.decode_into, parts, *outs), _RUNS)
        yield Speed(codec.name, encode_s, decode_s, 4 * keys.numel(), stored)


def speed_table(found: Iterable[Speed]) -> Iterator[str]:
    """A line a codec as Markdown."""
    yield "| codec | of bfloat16 | encode GB/s | decode GB/s |"
    yield "|---|--:|--:|--:|"
    for one in found:
        yield _cells([one.codec, f"{one.stored / one.nbytes:.3f}", *_rates(one)])


def _least_s(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)
