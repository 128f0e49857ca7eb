"""The scheduler's side: which rows of which request are offered, and what became of them. Knows of vLLM what it is shown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from blend.integrations.vllm.contract import Load
from blend.integrations.vllm.signature import PARAMETER, Signer

_LOG = logging.getLogger("vllm.kvblend")


class Offers:
    """All requests' offers, in the scheduler's one thread.

    refused: requests whose ticket was not given out here, until they end.
    """

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._warned = False
        self.refused: set[str] = set()
        self._failed: set[str] = set()
        self._pending: list[Load] = []

    def ticket(self, request: Any) -> str | None:
        """The ticket that a request carries, or None where blended KV must not be used for it.

        A request without a cache salt would leave blended blocks to others in the prefix cache. Log-probabilities of the
        prompt need all of its rows' outputs.
        """
        given = request.kv_transfer_params
        given = given.get(PARAMETER) if isinstance(given, dict) else None
        sampling = request.sampling_params
        salt = request.cache_salt if isinstance(request.cache_salt, str) else ""
        fits = salt and request.lora_request is None and request.prompt_token_ids is not None
        whole = sampling is None or sampling.prompt_logprobs is not None
        if not isinstance(given, dict) or not fits or whole:
            return None
        ticket = self._signer.ticket(given, salt)
        if ticket is None:
            self.refused.add(request.request_id)
        self._told(known=ticket is not None)
        return ticket

    def _told(self, *, known: bool) -> None:
        if not (known or self._warned):  # one line until there is a good one again
            _LOG.warning(
                "kvblend: a ticket is refused that was not given out by the middleware of this vLLM; if none is taken up, leave "
                "engine_id out of --kv-transfer-config"
            )
        self._warned = not known

    def rows(self, request: Any, computed: int) -> int:
        """How many rows behind those that vLLM has are offered: all of the prompt but the last.

        Asked again after a preemption the answer is the same; after a load that failed there is nothing any more.
        """
        if self.ticket(request) is None or request.request_id in self._failed:
            return 0
        return max(0, int(request.num_prompt_tokens) - 1 - computed)

    def allocated(self, request: Any, blocks: Sequence[int], rows: int) -> None:
        """VLLM has taken up an offer."""
        ticket = self.ticket(request)
        if rows <= 0 or ticket is None:
            return
        stop = request.num_prompt_tokens - 1
        ids = tuple(request.prompt_token_ids)
        self._pending.append(Load(request.request_id, ticket, ids, tuple(blocks), stop - rows, stop))

    def taken(self) -> tuple[Load, ...]:
        """Loads for this step."""
        loads, self._pending = tuple(self._pending), []
        return loads

    def failed(self, requests: Iterable[str]) -> None:
        """These loads failed: vLLM computes the rows itself."""
        self._failed.update(requests)

    def finished(self, request: Any) -> None:
        """The request has ended, or was given up."""
        self._failed.discard(request.request_id)
        self.refused.discard(request.request_id)
        self._pending = [load for load in self._pending if load.request != request.request_id]
