"""Which stage fills a request's blocks: its ticket says so, and the option "stage" says which stages there are.

Stage "auto" is that of vLLM's own model where this passes its check, and else the prefill process's. vLLM's server, which makes
the tickets, learns it from a socket that a worker holds open for as long as it recomputes rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any

from blend.errors import ConfigError
from blend.integrations.vllm import wire
from blend.integrations.vllm.contract import LoadFailedError, ModelRefusedError
from blend.integrations.vllm.loads import Done, Loads
from blend.integrations.vllm.rows_ticket import is_layout

if TYPE_CHECKING:
    from blend.integrations.vllm.contract import Load, MakeStage, Site, Stage

STAGES = {
    "copied": "blend.integrations.vllm.copied:CopiedKV",
    "rows": "blend.integrations.vllm.rows_stage:RecomputedRows",
}
"""Where each stage is made, by the name that the option "stage" gives."""
AUTO = "auto"
_OPTIONS = {"stage", "load", "key"}
_SECONDS = 5.0
_LOG = logging.getLogger("vllm.kvblend")


def stages_of(options: Mapping[str, Any]) -> dict[str, MakeStage]:
    """Those that an engine with these options may have. Raises `ValueError` for options that there are not."""
    stage, load = options.get("stage", "copied"), options.get("load")
    if stage != AUTO and stage not in STAGES:
        raise ValueError(f"kvblend: there is no stage {stage!r}; choose one of {', '.join(STAGES)}, {AUTO}")
    if load not in (None, "async", "sync"):
        raise ValueError(f"kvblend: load is {load!r}; choose async or sync")
    found = {name: _made(STAGES[name]) for name in STAGES if stage in (AUTO, name)}
    known = _OPTIONS.union(*(make.options for make in found.values()))
    if unknown := sorted(set(options) - known):
        raise ValueError(f"kvblend: stage {stage} has no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return found


def _made(place: str) -> MakeStage:
    module, _, name = place.partition(":")
    make: MakeStage = getattr(import_module(module), name)
    return make


def name_of(ticket: str) -> str:
    """The stage that a ticket is for."""
    return "rows" if is_layout(ticket) else "copied"


def is_apart(stages: Mapping[str, MakeStage], options: Mapping[str, Any], ticket: str) -> bool:
    """Whether the blocks of a request with this ticket are filled beside the batch, in scheduler and workers alike."""
    return _is_apart(stages, options, name_of(ticket))


def _is_apart(stages: Mapping[str, MakeStage], options: Mapping[str, Any], name: str) -> bool:
    make = stages.get(name)
    return make is not None and make.apart and options.get("load") != "sync"


class _Lacking:
    """Stands where a worker has no stage for a ticket: vLLM computes its rows."""

    apart, options, unfinished = False, frozenset[str](), False

    def fill(self, load: Load) -> dict[str, Any] | None:
        raise LoadFailedError(f"stage {name_of(load.ticket)}, which a ticket is for, is not there")

    def rest(self, *, alone: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Stages:
    """The stages of one worker process, used by the engine's thread alone. Raises `ValueError` where none works."""

    def __init__(self, site: Site, options: Mapping[str, Any], made: Mapping[str, MakeStage]) -> None:
        stages = {name: self._stage(site, options, make, only=len(made) == 1) for name, make in made.items()}
        self._loads = {
            name: Loads(stages.get(name) or _Lacking(), site.block_size, apart=_is_apart(made, options, name))
            for name in STAGES
        }
        self._beacon = None
        # One of the processes that a model is split over says it for all: all have the stage, or none.
        if len(made) > 1 and stages.get("rows") is not None and site.config.parallel_config.rank == 0:
            self._beacon = wire.bind(_beacon(site.config))
            self._beacon.listen(wire.BACKLOG)

    def _stage(self, site: Site, options: Mapping[str, Any], make: MakeStage, *, only: bool) -> Stage | None:
        try:
            return make(site, {key: value for key, value in options.items() if key in make.options})
        except ModelRefusedError as error:
            if only:
                raise
            _LOG.warning("%s, which is done now", error)
            return None

    def start(self, load: Load) -> None:
        """Have its blocks filled, now or beside, by the stage that its ticket is for; a stage that there is not fails."""
        self._loads[name_of(load.ticket)].start(load)

    def rest(self, *, alone: bool) -> None:
        """A step without loads begins. alone: without requests too."""
        for one in self._loads.values():
            one.rest(alone=alone)

    @property
    def unfinished(self) -> bool:
        """Whether `rest` has more to do."""
        return any(one.unfinished for one in self._loads.values())

    def done(self) -> Done:
        """What has ended since the last call. requests: of what was filled beside the batch alone, as vLLM counts them."""
        found = Done(set(), set(), set(), {})
        for one in self._loads.values():
            done = one.done()
            found.requests.update(done.requests if one.apart else ())
            found.failed.update(done.failed)
            found.blocks.update(done.blocks)
            found.figures.update(done.figures)
        return found

    def close(self) -> None:
        """The process ends."""
        for one in self._loads.values():
            one.close()
        if self._beacon is not None:
            self._beacon.close()


def options_of(config: Any) -> Mapping[str, Any]:
    """The connector's options in a `VllmConfig`."""
    transfer = getattr(config, "kv_transfer_config", None)
    return {} if transfer is None else transfer.kv_connector_extra_config or {}


def rows_options(config: Any) -> Mapping[str, Any] | None:
    """The connector's options in a vLLM that blends with its own model; None for any other. config: its `VllmConfig`."""
    options = options_of(config)
    stage = options.get("stage")
    if stage == AUTO:
        with suppress(wire.WireError), wire.connect(_beacon(config), _SECONDS):
            return options
        return None
    return options if stage == "rows" else None


def _beacon(config: Any) -> str:
    """A name that only this engine's processes know; it shows nothing of the id, by which tickets are signed."""
    engine = config.kv_transfer_config.engine_id
    if not engine:
        raise ConfigError("kvblend: this engine has no id; choose stage rows or copied")
    return f"@kvblend-rows-{sha256(engine.encode()).hexdigest()[:32]}"
