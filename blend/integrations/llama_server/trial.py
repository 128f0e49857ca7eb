"""Tries a llama-server: kvblend must be able to fill its slots, and they must then give the answers of its own rows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from blend.errors import ConfigError
from blend.integrations.llama_server.slot_files import SlotFiles
from blend.integrations.llama_server.upstream import Upstream, UpstreamError
from blend.layout import common_length

_TEXT = (
    "The harbour of the old town has seven gates. Each gate is closed at night by a keeper, who rings a bell of forty "
    "kilograms. In the morning the fishermen wait in front of the third gate, because it is opened first. When the keeper "
    "of the third gate was ill, the fishermen waited until"
)
_GRAMMAR = "root ::= [ -~]+"  # a token that is no text, or a part of a character, would come without log-probabilities
_LOGPROBS = 10
_CONTINUED = 6  # tokens
MOST_DIVERGENCE = 0.02  # nats a token: kernels of another build give less, other weights more
_LEAST_SHARE = 1e-6
_LOADING_S = 600.0
POLL_S = 1.5  # llama-server looks for clients that left when it has given no answer to anybody for a second
_UNSUPPORTED, _UNAVAILABLE = 501, 503


class ServerIdentity(NamedTuple):
    """What a llama-server says of itself, and what changes with its process.

    Attributes:
        slots: how many it has.
        longest: tokens of a slot.
        media: stands for pictures and sound in prompts; another one in each process.
        words: the model's path, and the build.
        adapters: LoRA adapters with their scales.

    """

    slots: int
    longest: int
    media: str
    words: tuple[str, ...]
    adapters: str

    @classmethod
    async def read(cls, upstream: Upstream) -> ServerIdentity:
        """That of a server. Raises `UpstreamError` and `ConfigError`."""
        props, adapters = await asyncio.gather(upstream.ask("/props"), _adapters(upstream))
        try:
            return cls(
                int(props["total_slots"]),
                int(props["default_generation_settings"]["n_ctx"]),
                str(props.get("media_marker", "")),
                (str(props.get("model_path")), str(props.get("model_ftype")), str(props.get("build_info"))),
                str(adapters),
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"{upstream.url} is no llama-server of one model: it names neither its slots nor their length"
            ) from None


async def _adapters(upstream: Upstream) -> Any:
    try:
        return await upstream.ask("/lora-adapters")
    except UpstreamError as error:
        if error.status in (404, _UNSUPPORTED):
            return []
        raise


async def reached(upstream: Upstream) -> ServerIdentity:
    """The server, once it has loaded its model. Raises `ConfigError`, with the remedy."""
    until = asyncio.get_running_loop().time() + _LOADING_S
    while True:
        try:
            return await ServerIdentity.read(upstream)
        except UpstreamError as error:
            if error.status == 401:
                raise ConfigError("llama-server asks for an API key: give it with --api-key") from None
            if error.status != _UNAVAILABLE or asyncio.get_running_loop().time() > until:
                raise ConfigError(str(error)) from None
        await asyncio.sleep(POLL_S)


class Continuation(NamedTuple):
    """How a text goes on.

    Attributes:
        tokens: the likeliest ones, one after another.
        logprobs: of each of them and of its likeliest alternatives, by token.
        computed: rows of the text that were computed.

    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    computed: int

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> Continuation:
        """That of a completion. Raises `LookupError`, `TypeError` or `ValueError` if it has none."""
        steps = reply["completion_probabilities"]
        logprobs = [{int(top["id"]): float(top["logprob"]) for top in step["top_logprobs"]} for step in steps]
        return cls([int(step["id"]) for step in steps], logprobs, int(reply["timings"]["prompt_n"]))

    def divergence(self, other: Continuation) -> float:
        """Mean KL to another one, nats a token, up to the first token in which they differ; all other tokens count as one."""
        steps = min(common_length(self.tokens, other.tokens) + 1, len(self.tokens), len(other.tokens))
        return math.fsum(map(_kl, self.logprobs[:steps], other.logprobs)) / steps


def _kl(expected: Mapping[int, float], logprobs: Mapping[int, float]) -> float:
    """KL of one token's log-probabilities to the expected ones. A token that is not listed is no likelier than the last one."""
    least = min(logprobs.values())
    wanted_shares = [math.exp(logprob) for logprob in expected.values()]
    shares = [math.exp(logprobs.get(token, least)) for token in expected]
    for column in (wanted_shares, shares):
        column.append(max(1 - math.fsum(column), _LEAST_SHARE))
    return math.fsum(p * math.log(p / q) for p, q in zip(wanted_shares, shares, strict=True))


class Trial:
    """The trial of one server.

    Args:
        upstream: the server.
        files: writes slot files, by the same model.

    """

    def __init__(self, upstream: Upstream, files: SlotFiles) -> None:
        self._upstream = upstream
        self._files = files

    async def run(self) -> ServerIdentity:
        """The server that passed. A slot that does little is used, and emptied. Raises `ConfigError`, with the remedy."""
        identity = await reached(self._upstream)
        await self._require_model(identity)
        slot = await self._idle_slot()
        ids = await self._trial_ids()
        expected = await self._continued(ids, slot, cache_prompt=False)
        await self._restore(ids, slot)
        behind_restored = await self._continued(ids, slot, cache_prompt=True)
        if behind_restored.computed > 1:
            raise ConfigError(
                "llama-server computes the rows of a restored slot again: start it with --swa-full if its model has "
                "windowed layers"
            )
        if expected.divergence(behind_restored) > MOST_DIVERGENCE:
            raise self._other_model(identity)
        await self._upstream.erase(slot)
        return identity

    async def _require_model(self, identity: ServerIdentity) -> None:
        """Compare sizes of vocabularies and weights."""
        models = await self._said("/v1/models")
        try:
            meta = models["data"][0]["meta"]
            sizes = {"n_vocab": int(meta["n_vocab"]), "n_params": int(meta["n_params"]), "size": int(meta["size"])}
        except (LookupError, TypeError, ValueError):
            return  # the rows are compared below
        ours = self._files.decoder.sizes
        if any(ours[name] != size for name, size in sizes.items()):
            raise self._other_model(identity)

    def _other_model(self, identity: ServerIdentity) -> ConfigError:
        return ConfigError(
            f"llama-server computes with other weights ({identity.words[0]}) than {self._files.decoder.name}: name its "
            "file with --model, and start it without adapters and control vectors"
        )

    async def _said(self, path: str) -> Any:
        try:
            return await self._upstream.ask(path)
        except UpstreamError as error:
            if error.status == _UNSUPPORTED and path == "/slots":
                raise ConfigError("llama-server was started with --no-slots: start it without") from None
            raise ConfigError(f"llama-server does not answer {path}: {error}") from None

    async def _idle_slot(self) -> int:
        """The idle slot that holds least."""
        while True:
            slots = await self._said("/slots")
            idle = [slot for slot in slots if not slot["is_processing"]]
            if idle:
                return int(min(idle, key=tokens_in)["id"])
            await asyncio.sleep(POLL_S)

    async def _trial_ids(self) -> tuple[int, ...]:
        try:
            return await self._upstream.tokenize(_TEXT)
        except UpstreamError as error:
            raise ConfigError(f"llama-server does not tokenise: {error}") from None

    async def _continued(self, ids: tuple[int, ...], slot: int, *, cache_prompt: bool) -> Continuation:
        """How llama-server goes on behind the trial's text."""
        try:
            reply = await self._upstream.complete(
                ids,
                id_slot=slot,
                cache_prompt=cache_prompt,
                n_predict=_CONTINUED,
                n_probs=_LOGPROBS,
                temperature=0,
                grammar=_GRAMMAR,
            )
            return Continuation.read(reply)
        except UpstreamError as error:
            raise ConfigError(f"llama-server does not complete a text: {error}") from None
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError("llama-server gives no log-probabilities: use a newer one") from error

    async def _restore(self, ids: tuple[int, ...], slot: int) -> None:
        """Fill the slot with kvblend's rows."""
        written = await self._files.write_exactly(ids)
        try:
            await self._upstream.restore(slot, written.path.name)
        except UpstreamError as error:
            raise await self._reason_against_files(slot, error) from None
        finally:
            written.remove()

    async def _reason_against_files(self, slot: int, refusal: UpstreamError) -> ConfigError:
        """Why a slot file was not restored: llama-server gives one reason for all."""
        folder = self._files.folder
        if refusal.status == _UNSUPPORTED:
            return ConfigError(
                f"llama-server was started without --slot-save-path: start it with --slot-save-path {folder}"
            )
        path = self._files.new_path()
        try:
            await self._upstream.save(slot, path.name)
            if not path.is_file():
                return ConfigError(
                    f"llama-server keeps its slots elsewhere than in {folder}: give both the same folder; {path.name} is "
                    "the file that it wrote there"
                )
        except UpstreamError:
            pass  # it may read there all the same
        finally:
            path.unlink(missing_ok=True)
        return ConfigError(
            f"llama-server cannot read kvblend's slot files ({refusal}): start it with --kv-unified, -fa on, and -ctk and "
            "-ctv as cache_type of --engine-options (f16 by default)"
        )


def tokens_in(slot: Mapping[str, Any]) -> int:
    """How many tokens a slot of `/slots` holds."""
    return int(slot.get("n_prompt_tokens") or 0)
