"""What vLLM's server, scheduler and workers agree on: loads, signed tickets, what is refused."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from blend.errors import ConfigError
from blend.integrations.vllm.workers import WorkerGroup
from blend.limits import check_corpus_name
from blend.types import Place, PlaceOrigin, PromptLayout

LOG = logging.getLogger("vllm.kvblend")
VERSIONS = ("0.32", "0.33")
"""Versions of vLLM in which the connector's tests pass: the connector interface changes with each."""
PARAMETER = "kvblend"
"""Our key in a request's `kv_transfer_params`."""
PREFILLS_ITSELF = "kvblend: %s; vLLM prefills by itself until it works again"
LEAST_CLAIMED = 0.25
"""Of a prompt: where vLLM's prefix cache holds more than the rest, its own prefill is as fast as a load."""
DAMAGED = "damaged"
"""A figure for vLLM's metrics, not for replies: how many damaged store entries a load found."""
_SPECULATES = "speculative decoding is not supported: start vLLM without --speculative-config"
_QUANTISED_CACHE = "a quantised KV cache is not supported: start vLLM with --kv-cache-dtype auto"
_PARALLEL = "pipeline and context parallelism are not supported; use tensor or data parallelism"
_POLICY = (
    'give "kv_load_failure_policy": "recompute" in --kv-transfer-config: else an outage of the store ends requests'
)


class Load(NamedTuple):
    """Rows of one request's prompt whose KV kvblend provides.

    request: vLLM's id. ticket: what the middleware said of the prompt. token_ids: the whole prompt. blocks: ids of the cache
    blocks of its rows, in order, as many as the prompt needs or more. start, stop: rows `start` to `stop - 1` are to be
    written; vLLM has those before, and computes those behind.
    """

    request: str
    ticket: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    start: int
    stop: int


class StepLoads(NamedTuple):
    """What is new for the workers in one step: loads, requests that have ended, and the time, the same in all workers."""

    loads: tuple[Load, ...] = ()
    cancelled: tuple[str, ...] = ()
    now: float = 0.0


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


@dataclass(frozen=True)
class Site:
    """What loads work on in one worker process of vLLM.

    config: the `VllmConfig`. names: the attention layers' names, in the decoder's order. layers: their modules, from the
    compilation config's static forward context. block_size: rows of a cache block. workers: of the model.
    """

    config: Any
    names: tuple[str, ...]
    layers: tuple[Any, ...]
    block_size: int
    workers: WorkerGroup

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.layers[0].kv_cache.device  # type: ignore[no-any-return]

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the layers that keep KV; the others read that of these."""
        shared = [getattr(layer, "kv_sharing_target_layer_name", None) is not None for layer in self.layers]
        return tuple(index for index, shares in enumerate(shared) if not shares)

    def write(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Put KV `[rows, kv_heads, head_dim]`, keys after RoPE, into a layer's cache with the engine's own writer.

        Of the heads of all workers each writes its own. Only the writer knows how a block is laid out (packed on CPUs, NHD or
        HND).
        """
        module = self.layers[layer]
        keys = self.workers.own_kv_heads(keys).contiguous()
        values = self.workers.own_kv_heads(values).contiguous()
        module.impl.do_kv_cache_update(module, keys, values, module.kv_cache, slots)


def slots_of(positions: torch.Tensor, blocks: Sequence[int], block_size: int) -> torch.Tensor:
    """Cache slots int64 `[rows]` of these positions, as the engine counts them."""
    table = torch.tensor(tuple(blocks), dtype=torch.int64, device=positions.device)
    return table[positions // block_size] * block_size + positions % block_size


def connector_options(config: Any) -> Mapping[str, Any]:
    """The connector's options in a `VllmConfig`; none where it has no connector."""
    transfer = getattr(config, "kv_transfer_config", None)
    options: Mapping[str, Any] = {} if transfer is None else transfer.kv_connector_extra_config or {}
    return options


def refuse_version(version: str) -> None:
    """Raise `ValueError` for a version of vLLM that the connector was never run with."""
    if not version.startswith(tuple(f"{supported}." for supported in VERSIONS)):
        raise ValueError(f"kvblend: vLLM {version} is not supported; install {' or '.join(VERSIONS)}")


def refuse(config: Any, cache: Any) -> None:
    """Raise `ValueError` for a `VllmConfig` and a `KVCacheConfig` for which blended KV was never shown to be right."""
    model = config.model_config
    parallel = config.parallel_config
    transfer = config.kv_transfer_config
    specs = [group.kv_cache_spec for group in (cache.kv_cache_groups if cache is not None else ())]
    limits = [getattr(spec, name, None) for spec in specs for name in ("sliding_window", "attention_chunk_size")]
    kinds = [type(spec).__name__ for spec in specs]
    widths = ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size")
    without = "not supported; serve this one without the connector"
    reasons = (
        (model.use_mla, f"models with latent attention (MLA) are {without}"),
        (config.lora_config is not None, "LoRA adapters are not supported: start vLLM without --enable-lora"),
        (any(limit is not None for limit in limits), f"models with sliding windows or chunked attention are {without}"),
        (kinds not in ([], ["FullAttentionSpec"]), f"models with several kinds of KV cache are {without}"),
        (model.is_encoder_decoder, f"encoder-decoder models are {without}"),
        (config.speculative_config is not None, _SPECULATES),
        (config.cache_config.cache_dtype != "auto", _QUANTISED_CACHE),
        (any(getattr(parallel, name, 1) != 1 for name in widths), _PARALLEL),
        (transfer.kv_role != "kv_consumer", 'the role must be "kv_role": "kv_consumer" in --kv-transfer-config'),
        (transfer.kv_load_failure_policy != "recompute", _POLICY),
    )
    if reason := next((reason for holds, reason in reasons if holds), ""):
        raise ValueError(f"kvblend: {reason}")


class Signer:
    """Signs tickets, so that the scheduler takes up only those of the middleware in front of its own engine.

    The secret is the engine's id, which vLLM draws at random and gives to all processes of an engine, and to no client.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of(cls, config: Any) -> Signer:
        """config: the `VllmConfig`. Raises `ConfigError` for an engine without an id."""
        transfer = getattr(config, "kv_transfer_config", None)
        if transfer is None:
            return cls(secrets.token_bytes(32))  # without a connector no ticket is taken up
        engine = (transfer.engine_id or "").partition("_dp")[0]  # with data parallelism engines append their number
        if not engine:
            raise ConfigError("kvblend: this engine has no id; leave engine_id out of --kv-transfer-config")
        return cls(engine.encode())

    def signed(self, ticket: str, salt: str) -> dict[str, Any]:
        """`kv_transfer_params` of a request with this ticket and this `cache_salt`."""
        return {PARAMETER: {"ticket": ticket, "signature": self._signature(ticket, salt)}}

    def ticket(self, parameter: Mapping[str, Any], salt: str) -> str | None:
        """The ticket in our parameter of a request with this `cache_salt`; None where the signature is wrong."""
        ticket = parameter.get("ticket")
        signature = parameter.get("signature")
        if not (isinstance(ticket, str) and isinstance(signature, str)):
            return None
        return ticket if hmac.compare_digest(encoded(signature), encoded(self._signature(ticket, salt))) else None

    def _signature(self, ticket: str, salt: str) -> str:
        signed = sha256(encoded(ticket)).digest() + sha256(encoded(salt)).digest()
        return hmac.digest(self._secret, b"kvblend vllm ticket" + signed, sha256).hex()


def encoded(text: str) -> bytes:
    """UTF-8, also of the lone surrogates that a client's JSON may hold."""
    return text.encode("utf-8", "surrogatepass")


class LayoutTicket(NamedTuple):
    """A prompt: segment lengths that, with the token ids, give its layout.

    corpus: whose surrogate context and KV corrections are used. quality: mean KL that the prompt may have; None: that of the
    connector. user: the end user for whom text is learned.
    """

    layout: PromptLayout
    corpus: str = ""
    quality: float | None = None
    user: str = ""

    def ticket(self) -> str:
        """As one line of text."""
        layout = self.layout
        lengths = [len(layout.prefix), *map(len, layout.chunks)]
        origins = [place.origin.value for place in layout.places]
        parts = [(index, place.part_of, place.first) for index, place in enumerate(layout.places) if place.part_of]
        fields = [lengths, origins, parts, layout.canonical_prefix, self.corpus, self.quality, self.user]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def read(cls, ticket: str, token_ids: Sequence[int]) -> LayoutTicket:
        """The ticket of the prompt with these token ids. Raises `ValueError` for a ticket that does not describe it."""
        ids = tuple(token_ids)
        try:
            lengths, origins, whole, canonical_prefix, corpus, quality, user = json.loads(ticket)
            if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) > len(ids):
                raise ValueError
            cuts = list(accumulate(lengths))
            spans = zip(pairwise(cuts), origins, strict=True)
            places = [Place(ids[start:stop], PlaceOrigin(origin)) for (start, stop), origin in spans]
            for index, tokens, first in whole:
                places[index] = places[index]._replace(part_of=tuple(tokens), first=first)
            check_corpus_name(corpus)
            if not (isinstance(quality, float | None) and isinstance(user, str)):
                raise ValueError
            canonical = None if canonical_prefix is None else tuple(canonical_prefix)
            layout = PromptLayout(ids[: cuts[0]], tuple(places), ids[cuts[-1] :], canonical)
        except (ValueError, TypeError, IndexError, ConfigError):
            raise ValueError("the ticket describes no prompt of these tokens") from None
        return cls(layout, corpus, quality, user)


class LoadScheduler:
    """Decides in vLLM's scheduler which rows of which request are loaded. One thread.

    refused: requests with a ticket of a wrong signature, until they end.
    """

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._outage = OutageLog()
        self.refused: set[str] = set()
        self._failed: set[str] = set()
        self._loading: set[str] = set()
        self._new: list[Load] = []
        self._cancelled: list[str] = []

    def ticket(self, request: Any) -> str | None:
        """The ticket of a request, or None where blended KV must not be used for it.

        Without a cache salt, blended blocks would serve other requests from the prefix cache. Log-probabilities of the prompt
        need the outputs of all rows.
        """
        transfer = request.kv_transfer_params
        parameter = transfer.get(PARAMETER) if isinstance(transfer, dict) else None
        sampling = request.sampling_params
        salt = request.cache_salt if isinstance(request.cache_salt, str) else ""
        fits = salt and request.lora_request is None and request.prompt_token_ids is not None
        if not isinstance(parameter, dict) or not fits or sampling is None or sampling.prompt_logprobs is not None:
            return None
        ticket = self._signer.ticket(parameter, salt)
        if ticket is None:
            self.refused.add(request.request_id)
            self._outage.failed(
                "kvblend: a ticket is refused that the middleware of this vLLM did not sign; if none is accepted, "
                "leave engine_id out of --kv-transfer-config"
            )
        else:
            self._outage.works()
        return ticket

    def rows(self, request: Any, computed: int) -> int:
        """How many rows behind the `computed` ones are claimed; 0 after a failed load, and where few are left.

        The last row is claimed too, though vLLM computes it: a prompt whose last row opens a block fails otherwise.
        """
        if self.ticket(request) is None or request.request_id in self._failed:
            return 0
        total = int(request.num_prompt_tokens)
        rows = total - computed
        return rows if rows > 1 and rows > LEAST_CLAIMED * total else 0

    def allocated(self, request: Any, blocks: Sequence[int], rows: int) -> None:
        """VLLM has allocated blocks for so many claimed rows."""
        ticket = self.ticket(request)
        if rows > 0 and ticket is not None:
            total = int(request.num_prompt_tokens)
            ids = tuple(request.prompt_token_ids)
            self._new.append(Load(request.request_id, ticket, ids, tuple(blocks), total - rows, total - 1))
            self._loading.add(request.request_id)

    def step(self) -> StepLoads:
        """What is new for the workers."""
        step = StepLoads(tuple(self._new), tuple(self._cancelled), time.monotonic())
        self._new = []
        self._cancelled = []
        return step

    def ended(self, failed: Iterable[str], loaded: Iterable[str]) -> None:
        """Loads have ended. failed: vLLM computes these rows itself."""
        self._failed.update(failed)
        self._loading.difference_update(failed, loaded)

    def finished(self, request: Any) -> None:
        """The request has ended or was aborted."""
        self._failed.discard(request.request_id)
        self.refused.discard(request.request_id)
        if request.request_id in self._loading:
            self._loading.discard(request.request_id)
            self._cancelled.append(request.request_id)
