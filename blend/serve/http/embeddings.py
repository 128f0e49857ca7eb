"""POST /v1/embeddings: vectors of the embedding model that searches the corpus."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from blend.serve.failures import log_error
from blend.serve.http.bodies import EmbeddingBody, read_body
from blend.serve.http.errors import Json, ended_early, json_response, refuse, unavailable
from blend.serve.http.state import AppState, admitted, client_of, disconnected, state_of
from blend.serve.http.to_requests import ModelNames, unknown_model
from blend.serve.http.tracing import entry_of
from blend.serve.turns import Slices
from blend_retrieval.errors import EmbeddingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from blend_retrieval.embedders import Embedder

_TEXTS = 8  # of one slice


async def embeddings(request: Request) -> Response:
    """Embed one text or several, as long as the client waits for them."""
    state = state_of(request)
    tenant = admitted(request)
    state.require_service()
    with state.bodies.receiving(request) as received:
        raw = await received.body()
        watch = asyncio.create_task(disconnected(request))
        try:
            work = _answer(raw, state, tenant, watch, entry_of(request).id)
            return json_response(await state.embeddings.run(client_of(request), work))
        finally:
            watch.cancel()


def _answer(raw: bytes, state: AppState, tenant: str, watch: asyncio.Task[None], identifier: str) -> Slices[Json]:
    body = read_body(raw, EmbeddingBody)
    service = state.require_service()
    names = ModelNames.of(service, tenant)
    try:
        corpus = (names.corpus_of(body.model) if body.model in names.names else None) or ""
        embedder = service.tenant(tenant).rag(corpus).embedder
    except EmbeddingError as error:
        log_error(error, identifier)
        message = "this server's embedding model cannot be loaded; its log says why"
        raise unavailable(message, retry_s=None) from error
    if not embedder.knows_meaning:
        raise refuse(
            "this corpus is searched by words: the server has no embedding model", "model", "model_not_found", 404
        )
    if body.model not in ("", embedder.name, *names.names):
        raise unknown_model(body.model, (embedder.name, *names.names))
    tokens = _checked(body, embedder)
    vectors = dict[int, list[float] | str]()
    shortest_last = sorted(range(len(body.input)), key=lambda index: -len(body.input[index]))
    for start in range(0, len(shortest_last), _TEXTS):  # similar lengths need less padding
        yield
        if watch.done():
            raise ended_early("cancelled")
        batch = shortest_last[start : start + _TEXTS]
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
    counts = embedder.count(body.input)
    for index, count in enumerate(counts):
        if embedder.window is not None and count > embedder.window:
            reads = f"{embedder.name} reads at most {embedder.window:,} tokens: divide the text"
            raise refuse(f"input[{index}] has {count:,} tokens; {reads}", "input", "context_length_exceeded")
    return sum(counts)


def _encoded(vector: npt.NDArray[np.float32], form: str) -> list[float] | str:
    """A vector as numbers, or as base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
