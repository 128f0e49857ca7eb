"""What vLLM's own model gives for rows where two processes hold it, beside kvblend's decoder; run where vLLM is.

Usage: rows_split_proof.py FOLDER, in which it leaves found.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows_engine import LENGTHS, SETTINGS, Engine, far, greedy, prompt
from tiny import save_model

from blend.blender import Blender
from blend.chunks.encode import leave_probe
from blend.config import BlendConfig
from blend.model.decoder import Decoder
from blend.store import open_store
from blend.types import PromptLayout


def configured(worker: Any, changes: dict[str, Any]) -> str:
    """In every process of the model: how rows are chosen from now on. Whose caches it uses; empty where it has no store."""
    from rows_connector import STAGES  # that process's own

    blender = STAGES[0].blender
    if blender is None:
        return ""
    blender.config = replace(blender.config, **changes)
    return blender.decoder.facts.fingerprint


class Proof:
    """A model in two processes, and a store that kvblend's decoder filled, with some prompts' chunks."""

    def __init__(self, folder: Path, kv_heads: int, lengths: tuple[int, ...]) -> None:
        self.folder = folder
        self.decoder = Decoder.load(
            str(save_model(folder / "model", num_key_value_heads=kv_heads)), device="cpu", dtype="float32"
        )
        self.store = open_store(str(folder / "store" / "kv"))
        self.blender = Blender(self.decoder, self.store, BlendConfig(**SETTINGS))
        leave_probe(self.store, self.decoder)
        self.layouts = list(map(prompt, lengths))
        for layout in self.layouts:
            library = self.blender.library(layout.prefix)
            library.compute(library.missing(layout.chunks))
        self.engine = Engine(
            folder / "model", folder / "store", "rows_connector", {"codec": "native"}, tensor_parallel_size=2
        )

    def configured(self, **changes: Any) -> list[str]:
        return self.engine.llm.collective_rpc(configured, args=(changes,))

    def own(self, layout: PromptLayout, **changes: Any) -> list[int]:
        """What kvblend decodes."""
        return greedy(self.decoder, self.blender.prefill(layout, config=replace(self.blender.config, **changes)))

    def equal(self, **changes: Any) -> bool:
        """Whether all prompts together are answered as kvblend does with this configuration."""
        self.configured(**changes)
        found = self.engine.decoded(self.layouts, json.dumps(changes))
        self.configured(**{name: getattr(self.blender.config, name) for name in changes})
        return found == [self.own(layout, **changes) for layout in self.layouts]

    def again(self) -> bool:
        """Whether prompts whose first blocks vLLM holds are answered alike. All rows: which are chosen may depend on it."""
        self.configured(ratio=1.0)
        first, second = (self.engine.decoded(self.layouts, "again") for _ in range(2))
        self.configured(ratio=self.blender.config.ratio)
        return first == second

    def lacking(self, layout: PromptLayout) -> int:
        """How many caches of a prompt's chunks the store lacks."""
        return len(self.blender.library(layout.prefix).missing(layout.chunks))

    def mixed(self) -> bool:
        """Blended prompts and plain ones of other tokens at once."""
        plain = list(map(prompt, (140, 300)))
        full = [self.own(layout, ratio=1.0) for layout in plain]
        told = self.engine.asked(self.layouts, "mixed") + self.engine.asked(plain, "plain", tickets=False)
        return self.engine.answers(told) == [*map(self.own, self.layouts), *full]

    def learnt(self) -> dict[str, Any]:
        """A prompt of unknown chunks: the answer, what is stored of them when the engine rests, and the next answer."""
        layout = prompt(401)
        before, full = self.lacking(layout), self.own(layout, ratio=1.0)
        answer = self.engine.decoded([layout], "learnt")[0]
        self.engine.idle()
        after, worst = self.lacking(layout), 0.0
        library = self.blender.library(layout.prefix)
        own = dict(library.encoder(contextual=False).encode(layout.chunks))
        for number, variant in enumerate(library.variants(layout.chunks)):
            held, mine = self.store.open(library.key(variant)), own[number]
            for layer, kv in enumerate(zip(mine.keys, mine.values, strict=True)):
                worst = max(worst, *(far(one, two) for one, two in zip(held.layer(layer), kv, strict=True)))
        then = self.engine.decoded([layout], "then")[0]
        return {
            "before": before,
            "full": answer == full,
            "after": after,
            "apart": worst,
            "then": then == self.own(layout) != full,
        }

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The store's folder is a file meanwhile, and whatever is read or written in it fails."""
        place, away = self.folder / "store" / "kv", self.folder / "away"
        place.rename(away)
        place.touch()
        try:
            yield
        finally:
            place.unlink()
            away.rename(place)

    def outages(self) -> dict[str, Any]:
        """The store fails for a moment, twice, while chunks are read and while they are to be stored."""
        new, found = prompt(433), dict[str, Any]()
        full = [self.own(layout, ratio=1.0) for layout in (*self.layouts, new)]
        with self.outage():
            found["full"] = self.engine.decoded([*self.layouts, new], "outage") == full
            self.engine.idle()
        found["again"] = self.engine.decoded(self.layouts, "back") == [*map(self.own, self.layouts)]
        return found

    def damaged(self) -> bool:
        """A prompt of which one entry is not what was written, and another is gone."""
        layout = self.layouts[-1]
        library = self.blender.library(layout.prefix)
        entries = [
            next((self.folder / "store").rglob(f"{library.key(variant).digest}*"))
            for variant in library.variants(layout.chunks[1:3])
        ]
        content = bytearray(entries[0].read_bytes())
        content[-1000] ^= 255
        entries[0].write_bytes(content)
        entries[1].unlink()
        mine = self.own(layout)
        return self.engine.decoded([layout], "damaged") == [mine]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    proof = Proof(folder / "two", 2, LENGTHS)
    prints = proof.configured()
    full = [proof.own(layout, ratio=1.0) for layout in proof.layouts]
    found = {
        "shared": prints == [proof.decoder.fingerprint, ""],
        "native": proof.engine.decoded(proof.layouts, "native", tickets=False) == full,
        "default": proof.equal(),
        "all rows": proof.equal(ratio=1.0),
        "no rows": proof.equal(ratio=0.0),
        "deviation": proof.equal(selector="hkvd"),
        "gradual": proof.equal(selector="gradual"),
        "differs": [proof.own(layout) != one for layout, one in zip(proof.layouts, full, strict=True)],
        "again": proof.again(),
        "mixed": proof.mixed(),
        "learnt": proof.learnt(),
        "damaged": proof.damaged(),
        "outages": proof.outages(),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
