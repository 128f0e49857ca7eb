"""POST /v1/embeddings: vectors of the embedding model that searches the corpus."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from blend.serve.failures import log_error
from blend.serve.http.bodies import EmbeddingBody, read_embedding
from blend.serve.http.errors import ended_early, json_response, refuse, unavailable
from blend.serve.http.questions import ModelNames, unknown_model
from blend.serve.http.requests import AppState, admitted, client_of, entry_of, state_of
from blend.serve.prompts.checks import MOST_OF_A_TOKEN
from blend.serve.turns import Slices
from blend_retrieval.errors import EmbeddingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from blend_retrieval.embedders import Embedder

_TEXTS = 8  # of one slice


async def embeddings(request: Request) -> Response:
    """Embed one text or several."""
    state = state_of(request)
    tenant = admitted(request)
    state.require_service()
    with state.bodies.receiving(request, state.limits.body_bytes, state.limits.body_s) as received:
        raw = await received.body()
        disconnected = threading.Event()
        watch = asyncio.create_task(_watch(request, disconnected))
        try:
            work = _answer(raw, state, tenant, disconnected, entry_of(request).id)
            return json_response(await state.embeddings.run(client_of(request, tenant), work))
        finally:
            watch.cancel()


async def _watch(request: Request, disconnected: threading.Event) -> None:
    """Note that the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    disconnected.set()


def _answer(
    raw: bytes,
    state: AppState,
    tenant: str,
    disconnected: threading.Event,
    identifier: str,
) -> Slices[dict[str, Any]]:
    if disconnected.is_set():
        raise ended_early("cancelled")
    body = read_embedding(raw)
    service = state.require_service()
    names = ModelNames.of(service, tenant)
    try:
        corpus = (names.corpus_of(body.model) if body.model in names.names else None) or ""
        embedder = service.tenant(tenant).rag(corpus).embedder
    except EmbeddingError as error:
        log_error(error, identifier)
        message = "this server's embedding model cannot be loaded; its log says why"
        raise unavailable(message, retry_s=None) from error
    if body.model not in (None, embedder.name, *names.names):
        raise unknown_model(body.model, (embedder.name, *names.names))
    tokens = _checked(body, embedder)
    vectors = dict[int, Any]()
    order = sorted(
        range(len(body.input)), key=lambda index: -len(body.input[index])
    )  # similar lengths need less padding
    for start in range(0, len(order), _TEXTS):
        yield
        if disconnected.is_set():
            raise ended_early("cancelled")
        batch = order[start : start + _TEXTS]
        for index, vector in zip(batch, embedder.embed([body.input[index] for index in batch]), strict=True):
            vectors[index] = _encoded(vector, body.encoding_format)
    data = [{"object": "embedding", "index": index, "embedding": vectors[index]} for index in range(len(vectors))]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model or embedder.name, "usage": usage}


def _checked(body: EmbeddingBody, embedder: Embedder) -> int:
    """Tokens of all texts. Raises `ApiError` for what the embedder cannot do."""
    if body.dimensions not in (None, embedder.dimension):
        message = f"the vectors of {embedder.name} have {embedder.dimension} dimensions; leave dimensions out"
        raise refuse(message, "dimensions")
    window = embedder.window
    for index, text in enumerate(body.input):
        if window is not None and len(text) > window * MOST_OF_A_TOKEN:
            raise refuse(*_too_long(index, f"{len(text):,} characters", embedder))
    counts = embedder.count(body.input)
    for index, count in enumerate(counts):
        if window is not None and count > window:
            raise refuse(*_too_long(index, f"{count:,} tokens", embedder))
    return sum(counts)


def _too_long(
    index: int,
    size: str,
    embedder: Embedder,
) -> tuple[str, str, str]:
    message = f"input[{index}] has {size}; {embedder.name} reads at most {embedder.window:,} tokens: divide the text"
    return message, "input", "context_length_exceeded"


def _encoded(vector: npt.NDArray[np.float32], form: str | None) -> list[float] | str:
    """A vector as numbers, or as base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
