"""From the body of a request to what the service is asked."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from blend.corpora import in_words
from blend.limits import shown
from blend.serve.engine import Sampling
from blend.serve.http.errors import refuse
from blend.serve.http.fields import IGNORED, IN_MESSAGES, UNSUPPORTED, body_of, without
from blend.serve.http.mistakes import mistake
from blend.serve.http.schemas import ChatBody, Common, CompletionBody, DocumentBody, OwnBody, UploadBody
from blend.serve.limits import RequestLimits
from blend.serve.request import AnswerRequest, GivenDocument, Message

_CORPUS = "+corpus"
_NO_MODEL, _NO_CORPUS = "model_not_found", "corpus_not_found"
OF_A_CORPUS = (_NO_MODEL, _NO_CORPUS)  # codes of refusals that another corpus would mend
BodyT = TypeVar("BodyT", bound=Common)


class Offered(NamedTuple):
    """What there is to be asked: the name of the model, the tenant and its corpora."""

    model: str
    tenant: str
    corpora: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of models that a request may carry: the model, and the model with a corpus that it retrieves from."""
        return (self.model, *(f"{self.model}{_CORPUS}{name and ':'}{name}" for name in self.corpora))


def read_body(raw: bytes, kind: type[BodyT], limits: RequestLimits) -> BodyT:
    """A checked body. Raises `ApiError` for whatever is wrong with it."""
    values = without(body_of(raw), UNSUPPORTED)
    for name in IGNORED:
        values.pop(name, None)
    own = values.get("kvblend")
    for name, holder, most in (
        ("messages", values, limits.messages),
        ("documents", values, limits.documents),
        ("documents", own if isinstance(own, dict) else {}, limits.documents),
    ):
        if isinstance(held := holder.get(name), list) and len(held) > most:
            raise refuse(f"{len(held):,} {name} are more than {most:,}, all that a request may bring; send fewer", name)
    if isinstance(messages := values.get("messages"), list):
        values["messages"] = [_message(number, one) for number, one in enumerate(messages)]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise mistake(error) from None


def _message(number: int, message: Any) -> Any:
    return without(message, IN_MESSAGES, f"messages[{number}].") if isinstance(message, dict) else message


def request_of(body: ChatBody | CompletionBody, offered: Offered, limits: RequestLimits) -> AnswerRequest:
    """The question in words of no protocol. Raises `ApiError`, or `ConfigError` for a sampling that is none."""
    _check_together(body)
    own = body.kvblend or OwnBody()
    documents = body.documents or own.documents or []
    top_k, corpus = _retrieval(body.model or offered.model, own, offered, limits.top_k)
    if isinstance(body, CompletionBody):
        _check_no_passages(body, own, retrieving=top_k is not None)
    sampling = Sampling(
        max_tokens=body.most_tokens or limits.answer_tokens,
        temperature=Sampling.temperature if body.temperature is None else body.temperature,
        top_p=Sampling.top_p if body.top_p is None else body.top_p,
        seed=body.seed,
        logprobs=body.wanted_logprobs,
        ignore_eos=bool(body.ignore_eos),
    )
    return AnswerRequest(
        messages=_messages(body),
        prompt=body.prompt if isinstance(body, CompletionBody) else None,
        tenant=offered.tenant,
        documents=tuple(_document(number, one) for number, one in enumerate(documents)),
        top_k=top_k,
        corpus=corpus,
        sampling=sampling,
        stop=tuple(body.stop or ()),
        method=own.method or "blend",
        cold=bool(own.cold),
        priority=_priority(own, offered.tenant),
        deadline_s=own.deadline_s,
        trace=bool(own.trace),
    )


def _priority(own: OwnBody, tenant: str) -> int:
    """ApiKeys share a server: one may stand back, and none may push ahead of all others."""
    if tenant and own.priority is not None and own.priority < 0:
        message = "a key with a tenant may not be more urgent than others; give a priority of 0 or more"
        raise refuse(message, "kvblend.priority", "forbidden", 403)
    return own.priority or 0


def _check_together(body: ChatBody | CompletionBody) -> None:
    """Fields that say something together only, or contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options is for streams; set stream to true or leave it out", "stream_options")
    if body.documents and body.kvblend and body.kvblend.documents:
        raise refuse("documents stand in two places; give them in one", "kvblend.documents")
    if not isinstance(body, ChatBody):
        return
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens and max_completion_tokens differ; give one", "max_tokens")


def _check_no_passages(body: CompletionBody, own: OwnBody, *, retrieving: bool) -> None:
    """A prompt that is to be continued has no place for documents: what brings some is refused by its name."""
    brought = {"documents": body.documents, "kvblend.documents": own.documents, "kvblend.retrieve": own.retrieve}
    for name, found in (*brought.items(), ("model", retrieving)):
        if found:
            raise refuse(
                f"{name} brings documents, and a completion has no place for them; ask /v1/chat/completions", name
            )


def _messages(body: ChatBody | CompletionBody) -> tuple[Message, ...]:
    if isinstance(body, CompletionBody):
        return ()
    return tuple(Message("system" if one.role == "developer" else one.role, one.content) for one in body.messages)


def uploads_of(raw: bytes) -> UploadBody:
    """The documents in a body. Raises `ApiError` for whatever is wrong with it."""
    try:
        body = UploadBody.model_validate(body_of(raw))
    except ValidationError as error:
        raise mistake(error) from None
    for number, one in enumerate(body.documents):
        if one.text is None:
            raise refuse(
                f"documents[{number}].text is missing", f"documents[{number}].text", "missing_required_parameter"
            )
    return body


def _document(number: int, document: DocumentBody) -> GivenDocument:
    place = f"documents[{number}]"
    if document.text is None and document.id is None:
        raise refuse(f"{place} needs a text, or the id of a document that is known", place)
    if document.text is not None and not document.text.strip():
        raise refuse(f"{place}.text is empty; give a text, or leave the document out", f"{place}.text")
    if document.text is None and document.title is not None:
        raise refuse(f"{place} is known by its id and has its title there; leave title out", f"{place}.title")
    return GivenDocument(document.text or "", document.title or "", document.id or "")


def _retrieval(model: str, own: OwnBody, offered: Offered, usual: int) -> tuple[int | None, str]:
    """How many chunks to retrieve, None for none, and which corpus is asked: by the model's name and by our fields."""
    if model not in offered.names:
        raise refuse(
            f"the model {shown(model)} does not exist; there are: {', '.join(offered.names)}",
            *("model", _NO_MODEL, 404),
        )
    named = model.removeprefix(offered.model)
    told = {
        "model": named.removeprefix(_CORPUS).removeprefix(":") if named else None,
        "kvblend.corpus": own.corpus,
        "kvblend.retrieve.corpus": own.retrieve.corpus if own.retrieve else None,
    }
    names = {field: name for field, name in told.items() if name is not None}
    field, corpus = next(iter(names.items()), ("kvblend.retrieve.corpus", ""))
    for other, name in names.items():
        if name != corpus:
            raise refuse(f"{other} names another corpus than {field}", other)
    if (names or own.retrieve) and corpus not in offered.corpora:
        held = ", ".join(map(in_words, offered.corpora))
        if not held:
            raise refuse("no document is indexed yet: add some, or ask without retrieval", field, _NO_CORPUS)
        lacking = f"no corpus {shown(corpus)}" if corpus else "no corpus without a name"
        raise refuse(f"there is {lacking}; there are: {held}", field, _NO_CORPUS)
    if own.retrieve is None:
        return (usual if named else None), corpus
    return own.retrieve.top_k or usual, corpus
