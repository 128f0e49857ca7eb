"""How much a server accepts and holds by default. Imports no model code: the command line shows these values."""

from __future__ import annotations

from dataclasses import dataclass

from blend.config import ANSWER_TOKENS, CorpusConfig

MOST_RUNNING = 16  # answers
MOST_WAITING = 64  # prompts
KV_BUDGET = 4 * 10**9  # bytes of the caches of running prompts
PREFIX_BUDGET = 10**9  # bytes of KV of earlier prompts and conversations
LEARN_BUDGET = 4 * 10**9  # bytes of each tenant's store for caches of texts that came with questions
MEMORY_BUDGET = 2 * 10**9  # bytes of chunk caches that are kept in memory
BODY_BUDGET = 25 * 10**7  # bytes of the bodies of all requests


@dataclass(frozen=True)
class RequestLimits:
    """How large and how slow one HTTP request may be, and its defaults.

    Attributes:
        head_s, first_s: seconds in which a request's head must arrive, and then the first bytes of its body. What a client
            still sends behind its answer must arrive in head_s, too.
        unread_s: seconds after which an answer is given up that its client does not read.
        body_bytes, body_s: most bytes of a question's body, and seconds in which it must arrive.
        upload_bytes, upload_s: the same for a request that adds documents.
        all_bytes: most bytes of all bodies in memory.
        corpora: most corpora of one tenant.
        answer_tokens, top_k: longest answer, and passages to retrieve, unless the request says otherwise.
        keep_alive_s: silence of a stream after which it sends a ping.
        event_s: seconds without a part of the answer after which a stream sends an empty one: some clients give up after 300 s.
        any_host: accept any Host header without an API key.
        origins: other sites whose pages may send requests, as browsers write them.

    """

    head_s: float = 10.0
    first_s: float = 10.0
    unread_s: float = 60.0
    body_bytes: int = 16 << 20
    body_s: float = 60.0
    upload_bytes: int = 64 << 20
    upload_s: float = 600.0
    all_bytes: int = BODY_BUDGET
    corpora: int = 64
    answer_tokens: int = ANSWER_TOKENS
    top_k: int = CorpusConfig.top_k
    keep_alive_s: float = 10.0
    event_s: float = 60.0
    any_host: bool = False
    origins: tuple[str, ...] = ()
