"""A precomputed corpus over a tiny model, and services over copies of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from changing import until
from engines import Answer

from blend.config import BlendConfig, CorpusConfig, PromptConfig
from blend.rag import Rag
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import Audit
from blend.serve.request import Message, Request
from blend.serve.service import Service

QUESTION = "How many gates does the harbour have?"
FEW = Sampling(max_tokens=8)


def make_rag(
    store: Path,
    model: Path,
    instructions: str = "Answer from these.",
    min_score: float = 0.0,
    *,
    reproducible: bool = False,
) -> Rag:
    corpus = CorpusConfig(chunk_tokens=96, top_k=4, surrogate_tokens=64, codec="native", min_score=min_score)
    # The tiny tokenizer makes so many tokens of a word that the usual instruction would be learned as a passage. A client that
    # sends the system message asks as `blend answer` does.
    prompt = PromptConfig(instruction="Answer from these.\n\n", question="{question}", chat_instructions=instructions)
    blend = BlendConfig(ratio=0.2, reproducible=reproducible)
    return Rag(store, model=str(model), device="cpu", blend=blend, prompt=prompt, corpus=corpus)


@contextmanager
def serving(
    store: Path,
    model: Path,
    *,
    learn_budget: int = 1 << 24,
    full: bool = False,
    instructions: str = "Answer from these.",
    min_score: float = 0.0,
    audit: float = 0.0,
    on_audit: Callable[[Audit], None] = lambda audit: None,
    corrects_learned: bool = False,
    least_gain: int = -(10**6),
    unnamed: str = "",
    reproducible: bool = False,
    **options: int,
) -> Iterator[Service]:
    """A service over a store.

    corrects_learned: whether KV corrections of learned text are fitted in idle time, which changes answers.
    """
    rag = make_rag(store, model, instructions, min_score, reproducible=reproducible)
    service: Service | None = None

    def blender_of(tenant: str, corpus: str):  # type: ignore[no-untyped-def]
        return service.tenant(tenant).rag(corpus).blender

    engine = EmbeddedEngine(rag.blender, blender_of=blender_of, least_gain=least_gain, **options)
    service = Service(
        rag, engine, learn_budget=learn_budget, full=full, audit=audit, on_audit=on_audit, unnamed=unnamed
    )
    if not corrects_learned:
        service.corrector.close()
    service.warm_up()
    try:
        yield service
    finally:
        service.close()


def ask(service: Service, *messages: str, **more: object) -> Answer:
    """Put a question: messages of user and assistant in turn."""
    roles = ("user", "assistant") * len(messages)
    said = tuple(Message(role, text) for role, text in zip(roles, messages, strict=False))  # type: ignore[arg-type]
    return put(service, Request(said, **{"sampling": FEW, **more}))  # type: ignore[arg-type]


def put(service: Service, request: Request) -> Answer:
    answer = Answer()
    service.submit(request, answer)
    return answer.wait()


def settled(service: Service) -> None:
    """Wait until the missing caches are computed."""
    until(lambda: service.engine.stats().idle)
