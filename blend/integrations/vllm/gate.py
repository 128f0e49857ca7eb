"""What becomes of a request before vLLM sees it: blended if there is somebody to blend it, and right in every case."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from blend.errors import ConfigError
from blend.integrations.vllm import wire
from blend.integrations.vllm.bodies import another_prompt, blended, plain_body, with_ids
from blend.integrations.vllm.check import reason_against
from blend.integrations.vllm.lease import Lease
from blend.integrations.vllm.local import LocalPrompts
from blend.integrations.vllm.network import key_path_of
from blend.integrations.vllm.outage import LeftAloneError, Outage
from blend.integrations.vllm.questions import part_of, plain_model, wants_context
from blend.integrations.vllm.rows_ticket import ready_for
from blend.integrations.vllm.signature import Signer
from blend.integrations.vllm.stages import options_of, rows_options
from blend.serve.http.errors import ApiError, Failure, failure_of, refuse, unavailable
from blend.serve.types import ASKED_FOR

_LOG = logging.getLogger("vllm.kvblend")
_TIMEOUT = "KVBLEND_VLLM_TIMEOUT"
_CHECK_S = 300.0
NO_PROCESS = "no prefill process"
_PASS_S = 5.0  # for who asks nothing of kvblend: until it says whether it has a part in the prompt


class Rewritten(NamedTuple):
    """A request for vLLM. told: what its reply is to say of the blend. lease: to be closed when the reply has ended."""

    body: dict[str, Any]
    told: dict[str, Any] | None = None
    lease: Lease | None = None


class _LostError(wire.WireError):
    """The prefill process has gone after it had told the prompt's tokens and its sources."""

    def __init__(self, words: str, prompt: list[int], sources: list[Any]) -> None:
        super().__init__(words)
        self.prompt, self.sources = prompt, sources


class Gate:
    """For one server process of vLLM; it is used in its event loop alone.

    engine: vLLM's client of its own engine. template: arguments that vLLM's chat template has by default. Raises `ConfigError`.
    """

    def __init__(self, engine: Any, template: Mapping[str, Any] | None = None) -> None:
        self._engine, self._template = engine, template or {}
        self._socket = os.environ.get(wire.VARIABLE, wire.SOCKET)
        self._seconds = _seconds(os.environ.get(_TIMEOUT, "60"))
        config = getattr(engine, "vllm_config", None)
        self._signer = Signer.of(config)
        self._key_path = key_path_of(options_of(config))
        self._rows = rows_options(config)
        self._local: LocalPrompts | None = None
        self._outage = Outage()
        self._checked: dict[str, asyncio.Future[str]] = {}
        self._refused: dict[str, str] = {}
        self._model_config = getattr(config, "model_config", None)

    async def rewritten(self, body: dict[str, Any], path: str) -> Rewritten:
        """What vLLM is to be asked instead. Raises `ApiError`."""
        wanted = wants_context(body)
        other = another_prompt(body, path)
        if other and wanted:
            raise refuse(f"{other} does not go together with documents or kvblend; leave one of them out", other)
        if other:
            return Rewritten(body)
        part = part_of(body, self._template)
        plain = plain_body(body) if wanted else body
        if self._rows is not None:
            return await self._by_rows(part, plain, wanted, path)
        try:
            with self._outage.watched():
                async with asyncio.timeout(self._seconds):
                    return await self._by_prefill(part, plain, wanted, path)
        except ApiError:
            raise
        except Exception as error:  # whatever it is, vLLM can answer
            self._tell(error)
            if isinstance(error, _LostError):
                return _full(plain, error.prompt, error.sources, NO_PROCESS, path) if wanted else Rewritten(plain)
            return await self._alone(part, plain, wanted, path)

    def _tell(self, error: Exception) -> None:
        if not isinstance(error, wire.WireError | TimeoutError):
            _LOG.error("kvblend: a request could not be handed over", exc_info=error)
        elif not isinstance(error, LeftAloneError):
            self._outage.tell(str(error) or "the prefill process did not answer in time")

    async def _by_prefill(self, part: dict[str, Any], plain: dict[str, Any], wanted: bool, path: str) -> Rewritten:
        lease: Lease | None = None
        try:
            async with asyncio.timeout(None if wanted else _PASS_S):
                asked = {"ask": part, "refused": self._refused}
                lease = await Lease.take(self._socket, asked, self._key_path)
                message = await lease.next()
            found = await self._followed(lease, message, plain, wanted, path)
        except BaseException:
            if lease is not None:
                lease.close()
            raise
        if found.lease is None:
            lease.close()
        return found

    async def _followed(
        self, lease: Lease, message: wire.Message, plain: dict[str, Any], wanted: bool, path: str
    ) -> Rewritten:
        """What the prefill process says of a question, from its first message up to the last word."""
        if "error" in message:
            status, words, code, param = message["error"]
            if status >= 500:
                raise wire.WireError("the prefill process failed at a question, its log says where")
            if not wanted:
                return Rewritten(plain)  # it may be right for vLLM
            raise ApiError(Failure(status, words, code, param))
        if "pass" in message:
            return Rewritten(plain)
        ids, sources = message["prompt"], message["sources"]
        if wanted:
            self._require_fit(ids)
        try:
            refused = await self._reason_against(message["model"])
            message = await lease.next()
        except wire.WireError as error:
            raise _LostError(str(error), ids, sources) from None
        told = message["told"]
        if "ready" not in message or refused:
            if not wanted:
                return Rewritten(plain)
            if refused or not told:
                return _full(plain, ids, sources, "refused" if refused else message["plain"], path)
            return Rewritten(with_ids(plain, ids, path), told)
        return Rewritten(blended(plain, ids, message["ready"], path, self._signer), told, lease)

    async def _by_rows(self, part: dict[str, Any], plain: dict[str, Any], wanted: bool, path: str) -> Rewritten:
        """VLLM's own model blends."""
        try:
            found = await asyncio.to_thread(self._prompts().prompt, part)
        except Exception as error:
            failure = failure_of(error)
            if wanted:
                raise ApiError(failure) from error
            if failure.status >= 500:
                self._outage.tell(f"passages in a prompt could not be looked for ({error})")
            return Rewritten(plain)  # it may be right for vLLM
        self._outage.over()
        if found is None:
            return Rewritten(plain)
        if wanted:
            self._require_fit(found.layout.token_ids)
        figures = {"method": "rows"}
        if found.reason:
            figures = {"method": "full", "reason": "" if found.reason == ASKED_FOR else found.reason}
        told = {"sources": list(found.sources), "figures": figures}
        if found.reason:
            return Rewritten(with_ids(plain, list(found.layout.token_ids), path) if wanted else plain, told)
        ready = ready_for(found.layout, found.corpus, found.generation, found.brought)
        return Rewritten(blended(plain, list(found.layout.token_ids), ready, path, self._signer), told)

    async def _alone(self, part: dict[str, Any], plain: dict[str, Any], wanted: bool, path: str) -> Rewritten:
        """Without the prefill process, which is away."""
        if not wanted:
            return Rewritten(plain)
        ours, model = part.get("kvblend") or {}, str(part.get("model", ""))
        if not isinstance(ours, dict) or ours.get("retrieve") is not None or plain_model(model) != model:
            raise unavailable("the corpus cannot be searched now; the server's log says why")
        if not part.get("documents") and not ours.get("documents"):
            return Rewritten(plain)
        try:
            found = await asyncio.to_thread(self._prompts().prompt, part)
        except Exception as error:
            raise ApiError(failure_of(error)) from error
        if found is None:
            return Rewritten(plain)
        self._require_fit(found.layout.token_ids)
        return _full(plain, list(found.layout.token_ids), list(found.sources), NO_PROCESS, path)

    def _require_fit(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that vLLM can never take, before it is blended."""
        longest = getattr(self._model_config, "max_model_len", None)
        if longest is not None and len(ids) >= longest:
            raise refuse(
                f"the prompt has {len(ids)} tokens with its passages; this model's maximum context length is {longest} tokens. "
                "Send fewer or shorter documents, or retrieve fewer passages",
                code="context_length_exceeded",
            )

    def _prompts(self) -> LocalPrompts:
        if self._local is None:
            self._local = LocalPrompts(self._engine.renderer.get_tokenizer(), self._rows)
        return self._local

    def begin(self) -> None:
        """Compare with a prefill process that is there already, before the first question."""
        if self._rows is None:
            self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        with suppress(wire.WireError, TimeoutError):
            async with await Lease.take(self._socket, {"holding": True}, self._key_path) as lease:
                model = str((await lease.next())["model"])
            await self._reason_against(model)

    async def _reason_against(self, model: str) -> str:
        """Why KV of this model must not be used, found out when it is first seen. A request may go without waiting for it."""
        if model not in self._checked:
            self._checked[model] = asyncio.ensure_future(self._checking(model))
        return await asyncio.shield(self._checked[model])

    async def _checking(self, model: str) -> str:
        try:
            reason = await self._compared()
        except BaseException:
            del self._checked[model]  # another time, then
            raise
        if reason:
            self._refused[model] = reason
            _LOG.error("kvblend: blended KV is not used: %s", reason)
        else:
            _LOG.info("kvblend: vLLM's log-probabilities over KV of the prefill process are its own")
        return reason

    async def _compared(self) -> str:
        asked = {"check": str(getattr(self._model_config, "dtype", "")).removeprefix("torch.")}
        async with asyncio.timeout(_CHECK_S), await Lease.take(self._socket, asked, self._key_path) as lease:
            message = await lease.next()
            if "refused" in message:
                return str(message["refused"])
            try:
                reason = await reason_against(self._engine, message["checks"], self._signer)
            except Exception as error:  # vLLM would say the same again
                reason = f"it could not be compared with vLLM's own ({error})"
            await lease.say({"verdict": reason})
            return reason


def _full(plain: dict[str, Any], ids: list[int], sources: list[Any], reason: str, path: str) -> Rewritten:
    """The prompt with its passages, which vLLM computes by itself."""
    return Rewritten(with_ids(plain, ids, path), {"sources": sources, "figures": {"method": "full", "reason": reason}})


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 86_400:
        raise ConfigError(f"{_TIMEOUT} is {text!r}; give seconds, more than 0")
    return found
