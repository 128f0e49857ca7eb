"""Rows by vLLM's own model compared with kvblend's decoder, on a tiny random model; run where vLLM is.

Usage: rows_proof.py FOLDER, in which it leaves found.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from offline import Engine
from rows_connector import MADE
from tiny import save_model

from blend.blender import Blend, Blender
from blend.chunks.encode import leave_probe
from blend.chunks.library import with_surrogate
from blend.config import BlendConfig
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.decoder import Place
from blend.integrations.vllm.learning import LearnedTexts
from blend.integrations.vllm.stage import RowBlender, row_blender
from blend.model.decoder import Decoder
from blend.store import open_store
from blend.types import PromptLayout

LENGTHS = (127, 128, 129, 517, 630)
STEPS = 16
SETTINGS: dict[str, Any] = {"ratio": 0.15, "correction": False}


def prompt(length: int) -> PromptLayout:
    """A prefix of 20 tokens, four chunks, of which none ends where a block does, and a question of 9."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 512, (length,), generator=draw).tolist()
    shared = torch.randint(5, 512, (20,), generator=torch.Generator().manual_seed(7)).tolist()
    cuts = [20, *(20 + (length - 29) * part // 9 for part in (2, 4, 7)), length - 9]
    chunks = tuple(tuple(ids[a:b]) for a, b in pairwise(cuts))
    return PromptLayout(tuple(shared), chunks, tuple(ids[-9:]))


def greedy(decoder: Decoder, blend: Blend) -> list[int]:
    """By kvblend's own decoding."""
    found, logits = list[int](), blend.logits[0]
    for _ in range(STEPS):
        found.append(int(logits.argmax()))
        logits = decoder.append(torch.tensor([[found[-1]]]), blend.cache)[0, -1]
    return found


def far(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((mine - other).abs().amax() / other.abs().amax())


class Proof:
    """model: what vLLM loads. decoder: what is to give the same; its caches and its probe are in the store. more: of vLLM."""

    def __init__(
        self, folder: Path, model: Path, decoder: Decoder, lengths: tuple[int, ...] = LENGTHS, **more: Any
    ) -> None:
        self.decoder = decoder
        self.store = open_store(str(folder / "store" / "kv"))
        self.blender = Blender(self.decoder, self.store, BlendConfig(**SETTINGS))
        self.layouts = [prompt(length) for length in lengths]
        leave_probe(self.store, self.decoder)
        for layout in self.layouts:
            library = self.blender.library(layout.prefix)
            library.compute(library.missing(layout.chunks))
        options = {"stage": "rows", "store": str(folder / "store"), "learn": False, **SETTINGS}
        self.engine = Engine(model, options, "rows_connector", max_num_seqs=8, max_num_batched_tokens=1024, **more)
        self.stage = MADE[-1]
        self.rows = self.stage.blender

    def decoded(self, salt: str, *, tickets: bool = True) -> list[list[int]]:
        """Greedy tokens of every prompt by vLLM, blended or plain."""
        return self.engine.tokens(asked(self.layouts, salt, tickets=tickets), STEPS)

    def configured(self, **changes: Any) -> BlendConfig:
        config = replace(self.blender.config, **changes)
        self.stage.blender = RowBlender(self.rows.decoder, self.store, config)
        return config

    def tokens(self, **changes: Any) -> dict[str, Any]:
        """Whether decoding goes on alike, and how far apart the KV of all rows is, for a configuration."""
        config = self.configured(**changes)
        mine = [self.blender.prefill(layout, config=config) for layout in self.layouts]
        rows = [self.stage.blender.blend(layout, spare(layout)) for layout in self.layouts]
        found: dict[str, Any] = {
            "rows": [
                [*one.selection.rows.tolist()] == [*two.selection.rows.tolist()]
                for one, two in zip(mine, rows, strict=True)
            ],
            "kv": max(self._apart(one, two.cache) for one, two in zip(mine, rows, strict=True)),
            "recomputed": [one.rows_recomputed for one in mine],
        }
        if mine[0].selection.scores is not None:
            pairs = zip(mine, rows, strict=True)
            found["scores"] = max(far(two.selection.scores, one.selection.scores) for one, two in pairs)
        found["equal"] = self.decoded(json.dumps(changes)) == [greedy(self.decoder, one) for one in mine]
        return found

    def _apart(self, blend: Blend, cache: Any) -> float:
        """KV of all rows but the last, which vLLM runs, and of all layers."""
        last = blend.layout.rows - 1
        return max(
            far(theirs[:, :, :last], ours[:, :, :last])
            for layer in range(len(self.decoder.layers))
            for theirs, ours in zip(cache.view(layer), blend.cache.view(layer), strict=True)
        )

    def encoded(self) -> float:
        """How far chunk caches by vLLM are from those of kvblend's encoder, alone and behind a surrogate context."""
        worst = 0.0
        for contextual in (False, True):
            layout = self.layouts[-1]
            encoders = [
                filler.library(layout.prefix).encoder(contextual=contextual)
                for filler in (self.blender, self.rows.filler())
            ]
            mine, theirs = (dict(encoder.encode(layout.chunks)) for encoder in encoders)
            for number, cache in mine.items():
                pairs = zip((*theirs[number].keys, *theirs[number].values), (*cache.keys, *cache.values), strict=True)
                worst = max(worst, *(far(one, two) for one, two in pairs))
        return worst

    def in_context(self) -> dict[str, Any]:
        """As `tokens`, when the store has gained a surrogate context and KV corrections."""
        prefix, chunks = self.layouts[0].prefix, [chunk for layout in self.layouts for chunk in layout.chunks]
        library = with_surrogate(self.blender.library(prefix), chunks, 60)
        library.compute(library.missing(chunks))
        self.blender.calibrate(prefix, chunks)
        assert self.blender.correction(prefix, contextual=True)
        return self.tokens(correction=True, ratio=0.2)

    def unknown(self) -> dict[str, Any]:
        """A prompt whose chunks the store misses: blended at once, and again when they have been computed."""
        layout = prompt(333)
        config = self.configured()
        rows = self.stage.blender
        full = self.blender.prefill(layout, config=replace(config, ratio=1.0))
        first = rows.blend(layout, spare(layout))
        before = self.missing(layout)
        while len(rows.background):
            rows.background.run(alone=True)
        mine, again = self.blender.prefill(layout, config=config), rows.blend(layout, spare(layout))
        return {
            "nothing there": not any(first.hits),
            "full": self._apart(full, first.cache),
            "computed": before - self.missing(layout),
            "hits": all(mine.hits) and all(again.hits),
            "then": self._apart(mine, again.cache),
        }

    def missing(self, layout: PromptLayout) -> int:
        """How many caches of a prompt's chunks are missing in the store."""
        return len(self.blender.library(layout.prefix).missing(layout.chunks))

    def learnt(self) -> dict[str, Any]:
        """A prompt of unknown chunks through the engine: its chunks are stored while the engine is idle."""
        layout = prompt(401)
        self.configured()
        before = self.missing(layout)
        full = greedy(self.decoder, self.blender.prefill(layout, config=BlendConfig(ratio=1.0)))
        answer = self.engine.tokens(asked([layout], "learnt"), STEPS)[0]
        during = self.missing(layout)
        steps = self.engine.idle()
        after, again = self.missing(layout), self.engine.idle()
        return {
            "before": before,
            "during": during,
            "after": after,
            "full": answer == full,
            "steps": steps,
            "again": again,
        }

    def brought(self, folder: Path) -> dict[str, Any]:
        """Chunks that came with the request: with learning off, as the engine is configured, and within a budget."""
        layout, found = prompt(417), dict[str, Any]()
        self.stage.blender = self.rows
        self.engine.tokens(asked([layout], "off", brought=True), STEPS)
        self.engine.idle()
        found["before"], found["off"] = len(layout.chunks), self.missing(layout)
        learned = LearnedTexts(self.store, folder / "store", 10**9)
        self.stage.blender = RowBlender(self.rows.decoder, self.store, self.blender.config, learned)
        self.engine.tokens(asked([layout], "on", brought=True), STEPS)
        self.engine.idle()
        found["on"] = self.missing(layout)
        return found

    def damaged(self, folder: Path) -> dict[str, Any]:
        """A prompt of which one entry is not what was written."""
        layout = self.layouts[3]
        library = self.blender.library(layout.prefix)
        variants = library.variants([layout.chunks[1]])[-1]
        entry = next((folder / "store").rglob(f"{library.key(variants).digest}*"))
        content = bytearray(entry.read_bytes())
        content[-1000] ^= 255
        entry.write_bytes(content)
        mine, theirs = self.blender.prefill(layout), self.stage.blender.blend(layout, spare(layout))
        connector = self.engine.llm.llm_engine.engine_core.engine_core.scheduler.connector
        counted, take = dict[str, int](), connector.get_kv_connector_stats
        connector.get_kv_connector_stats = lambda: (stats := take()) and (counted.update(stats.data), stats)[1]
        reply = self.engine.outputs(asked([layout], "damaged"), STEPS)[0].kv_transfer_params
        connector.get_kv_connector_stats = take
        return {
            "problems": len(theirs.problems),
            "kv": self._apart(mine, theirs.cache),
            "counted": counted,
            "reply": reply["kvblend"],
        }

    def fitted(self) -> dict[str, Any]:
        """Caches under the worker's own name: prompts until there is a KV correction for them, and one more."""
        own = self.rows.decoder.named("own", "float32")
        rows = RowBlender(own, self.store, BlendConfig(ratio=0.15))
        prefix, passes, fills = self.layouts[0].prefix, list[int](), list[Any]()
        run = own.model.run
        for length in range(800, 900, 12):
            layout = prompt(length)
            rows.blend(layout, spare(layout))
            own.model.run = lambda one, see: (passes.append(one.token_ids.shape[0]), run(one, see))[1]
            while len(rows.background):
                rows.background.run(alone=True)
            own.model.run = run
            fills.append(rows.blend(layout, spare(layout)))
            if length == 800:
                self.stage.blender = rows
                figures = self.engine.outputs(asked([layout], "figures"), STEPS)[0].kv_transfer_params
        rows.background.close()
        library, filler = rows.filler().library(prefix), rows.filler()
        return {
            "figures": figures["kvblend"],
            "uncorrected": [one.uncorrected for one in fills],
            "recomputed": [int(one.selection.rows.shape[0]) for one in fills],
            "surrogate": sum(map(len, library.surrogate)),
            "maps": [filler.correction(prefix, contextual=kind) is not None for kind in (False, True)],
            "missing": len(fills[-1].missing),
            "hits": all(fills[-1].hits),
            "most rows": max(passes),
        }

    def identities(self, folder: Path) -> dict[str, bool]:
        """Whether caches are shared with kvblend's decoder: with its probe in the store, in another dtype, and without it."""
        mine = self.decoder.fingerprint
        empty = row_blender(self.rows.decoder.model, {"store": str(folder / "empty"), **SETTINGS})
        half = Decoder.load(str(folder / "model"), device="cpu", dtype="bfloat16")
        leave_probe(open_store(str(folder / "half" / "kv")), half)
        other = row_blender(self.rows.decoder.model, {"store": str(folder / "half"), **SETTINGS})
        return {
            "in another dtype": other.decoder.identity((1,)) == half.identity((1,)),
            "with probe": self.rows.decoder.fingerprint == mine,
            "without": empty.decoder.fingerprint == mine,
        }


def asked(
    layouts: list[PromptLayout], salt: str, *, tickets: bool = True, brought: bool = False
) -> list[tuple[PromptLayout, str | None, str]]:
    """These prompts with tickets, or plain. brought: by a client, with all their chunks."""
    found = []
    for number, layout in enumerate(layouts):
        ticket = LayoutTicket(layout, "", frozenset(range(len(layout.chunks)) if brought else ())).ticket()
        found.append((layout, ticket if tickets else None, f"{salt}{number}"))
    return found


def spare(layout: PromptLayout) -> Place:
    """Blocks at the end of the engine's cache, which it takes last."""
    return Place(tuple(range(100, 100 - layout.rows // 128 - 2, -1)), 0, layout.rows - 1)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    model = save_model(folder / "model")
    proof = Proof(folder, model, Decoder.load(str(model), device="cpu", dtype="float32"))
    plain = [
        greedy(proof.decoder, proof.blender.prefill(layout, config=BlendConfig(ratio=1.0))) for layout in proof.layouts
    ]
    found = {
        "default": proof.tokens(),
        "all rows": proof.tokens(ratio=1.0),
        "no rows": proof.tokens(ratio=0.0),
        "random": proof.tokens(selector="random", ratio=0.3),
        "deviation": proof.tokens(selector="hkvd"),
        "gradual": proof.tokens(selector="gradual"),
        "native is full": proof.decoded("native", tickets=False) == plain,
        "identities": proof.identities(folder),
        "again": proof.decoded("d") == proof.decoded("d"),
        "in context": proof.in_context(),
        "encoded": proof.encoded(),
        "unknown": proof.unknown(),
        "fitted": proof.fitted(),
        "learnt": proof.learnt(),
        "brought": proof.brought(folder),
        "damaged": proof.damaged(folder),
        "blended differs": [a != b for a, b in zip(proof.decoded("e"), plain, strict=True)],
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
