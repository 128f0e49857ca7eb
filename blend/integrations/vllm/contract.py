"""What vLLM's server, scheduler and workers agree on: options, what is refused, signed tickets."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from blend.config import BlendConfig, CorpusConfig
from blend.errors import ConfigError
from blend.layout import Place, PlaceOrigin, PromptLayout
from blend.ranges import check_number
from blend.serve.limits import LEARN_BUDGET

LOG = logging.getLogger("vllm.kvblend")
VERSIONS = ("0.32", "0.33")
"""Versions of vLLM in which the connector's tests pass: the connector interface changes with each."""
PARAMETER = "kvblend"
"""Our key in a request's `kv_transfer_params`."""
PREFILLS_ITSELF = "kvblend: %s; vLLM prefills by itself until it works again"
BOOK = "learned-rows.sqlite"
"""The list of what workers have learned, in the store."""
_BLEND = {"ratio", "quality", "flips", "selector", "surrogate", "correction"}
_CORPUS = {"chunk_tokens", "codec", "embedder", "top_k"}
_OPTIONS = sorted({"store", "learn", "learn_budget", *_BLEND, *_CORPUS})
_POLICY = (
    'give "kv_load_failure_policy": "recompute" in --kv-transfer-config: else an outage of the store ends requests'
)


class OutageLog:
    """One line for an outage: the first failure is logged, and the first success behind it where there are words for that."""

    def __init__(self, over: str = "") -> None:
        self._over = over
        self._failing = False

    def failed(self, message: str, *values: object, exc_info: bool = False) -> None:
        """Something failed."""
        if not self._failing:
            LOG.warning(message, *values, exc_info=exc_info)
        self._failing = True

    def works(self) -> None:
        """Something succeeded."""
        if self._failing and self._over:
            LOG.info(self._over)
        self._failing = False


class Options(NamedTuple):
    """Options of the connector.

    embedder: whether one is named. learn_budget: bytes of the store for clients' texts; 0 stores none.
    """

    store: str
    blend: BlendConfig
    corpus: CorpusConfig
    embedder: bool
    learn_budget: int

    @classmethod
    def of(cls, config: Any) -> Options:
        """Those in a `VllmConfig`. Raises `ConfigError`."""
        transfer = config.kv_transfer_config
        values: Mapping[str, Any] = {} if transfer is None else transfer.kv_connector_extra_config
        if "store" not in values:
            raise ConfigError("this vLLM has no connector of kvblend with the option store; see docs/vllm.md")
        for name in values:
            if name not in _OPTIONS:
                raise ConfigError(f"there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        learn = values.get("learn", True)
        if not isinstance(learn, bool):
            raise ConfigError(f"learn is {learn!r}; give true or false")
        budget = values.get("learn_budget", LEARN_BUDGET / 1e9)
        check_number("learn_budget", budget)
        return cls(
            store=values["store"],
            blend=BlendConfig(**{name: values[name] for name in _BLEND & values.keys()}),
            corpus=CorpusConfig(**{name: values[name] for name in _CORPUS & values.keys()}),
            embedder="embedder" in values,
            learn_budget=round(budget * 1e9) if learn else 0,
        )


def refuse_version(version: str) -> None:
    """Raise `ConfigError` for a version of vLLM that the connector was never run with."""
    if not version.startswith(tuple(f"{supported}." for supported in VERSIONS)):
        raise ConfigError(f"kvblend: vLLM {version} is not supported; install {' or '.join(VERSIONS)}")


def refuse(config: Any, cache: Any) -> None:
    """Raise `ConfigError` for wrong options, and where blended KV was never shown to be right.

    config: the `VllmConfig`. cache: the `KVCacheConfig`, or None where it is not known yet.
    """
    Options.of(config)
    model = config.model_config
    parallel = config.parallel_config
    specs = [group.kv_cache_spec for group in (cache.kv_cache_groups if cache is not None else ())]
    limits = [getattr(spec, name, None) for spec in specs for name in ("sliding_window", "attention_chunk_size")]
    kinds = [type(spec).__name__ for spec in specs]
    widths = ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size")
    without = "not supported; serve this one without the connector"
    reasons = {
        f"models with latent attention (MLA) are {without}": model.use_mla,
        f"models with sliding windows or chunked attention are {without}": any(limit is not None for limit in limits),
        f"models with several kinds of KV cache are {without}": kinds not in ([], ["FullAttentionSpec"]),
        f"models that read more than text are {without}": model.is_multimodal_model,
        f"several engines of a model with experts are {without}": model.is_moe and parallel.data_parallel_size > 1,
        "LoRA adapters are not supported: start vLLM without --enable-lora": config.lora_config is not None,
        "speculative decoding is not supported: start vLLM without --speculative-config": config.speculative_config,
        "a quantised KV cache is not supported: start vLLM with --kv-cache-dtype auto": (
            config.cache_config.cache_dtype != "auto"
        ),
        "pipeline and context parallelism are not supported; use tensor or data parallelism": any(
            getattr(parallel, name, 1) != 1 for name in widths
        ),
        _POLICY: config.kv_transfer_config.kv_load_failure_policy != "recompute",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(reason)


class Signer:
    """Signs tickets, so that the scheduler takes up only those of the middleware in front of its own engine.

    The secret is the engine's id, which vLLM draws at random and gives to all processes of an engine, and to no client.
    config: the `VllmConfig`. Raises `ConfigError` for an engine without an id.
    """

    def __init__(self, config: Any) -> None:
        # With data parallelism engines append their number.
        engine = (config.kv_transfer_config.engine_id or "").partition("_dp")[0]
        if not engine:
            raise ConfigError("this engine has no id; leave engine_id out of --kv-transfer-config")
        self._secret = engine.encode()

    def signed(self, ticket: str, salt: str) -> dict[str, Any]:
        """`kv_transfer_params` of a request with this ticket and this `cache_salt`."""
        return {PARAMETER: {"ticket": ticket, "signature": self._signature(ticket, salt).decode()}}

    def is_signed(self, ticket: str, signature: str, salt: object) -> bool:
        """Whether it is the signature of a request with this ticket and this `cache_salt`."""
        return hmac.compare_digest(signature.encode(errors="replace"), self._signature(ticket, salt))

    def _signature(self, ticket: str, salt: object) -> bytes:
        signed = json.dumps(["kvblend vllm ticket", ticket, salt]).encode()
        return hmac.digest(self._secret, signed, "sha256").hex().encode()


class LayoutTicket(NamedTuple):
    """What the middleware says of a prompt.

    Attributes:
        corpus: whose surrogate context and KV corrections are used.
        quality: mean KL that the prompt may have; None: that of the connector.
        user: the end user for whom text is learned.
        awaited: for each place of the layout, how many other requests in flight bring its text, too; empty where none do.

    """

    layout: PromptLayout
    corpus: str = ""
    quality: float | None = None
    user: str = ""
    awaited: tuple[int, ...] = ()

    def text(self) -> str:
        """As one line."""
        layout = self.layout
        places = [(place.tokens, place.origin.value, place.part_of, place.first) for place in layout.places]
        return json.dumps([layout.prefix, places, layout.suffix, layout.canonical_prefix, *self[1:]])

    @classmethod
    def read(cls, text: str) -> LayoutTicket:
        """The ticket with this text."""
        prefix, places, suffix, canonical_prefix, *setting = _tuples(json.loads(text))
        texts = [Place(tokens, PlaceOrigin(origin), part_of, first) for tokens, origin, part_of, first in places]
        return cls(PromptLayout(prefix, tuple(texts), suffix, canonical_prefix), *setting)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
