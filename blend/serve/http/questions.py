"""Makes the service's requests out of the bodies of questions, and finds the corpus that a question names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.corpora import in_words
from blend.limits import shown
from blend.sampling import RANGES, Sampling
from blend.serve.http.bodies import ChatBody, CompletionBody, DocumentBody, OwnBody
from blend.serve.http.chat import messages_of, schema_of, tools_of
from blend.serve.http.errors import ApiError, refuse
from blend.serve.limits import RequestLimits
from blend.serve.request import GivenDocument, Request

if TYPE_CHECKING:
    from blend.serve.service import Service

_SAMPLING = ("seed", "ignore_eos", *RANGES.keys() - {"max_tokens", "logprobs"})
"""Fields of a body and of `Sampling` with the same meaning."""
CORPUS = "+corpus"
"""Behind a model's name; the name of a corpus may follow."""
_NO_MODEL = "model_not_found"
_NO_CORPUS = "corpus_not_found"
CORPUS_CODES = (_NO_MODEL, _NO_CORPUS)
"""Codes of refusals that depend on which corpora exist."""


class ModelNames(NamedTuple):
    """The names that a request may use: the model, and the corpora of its tenant."""

    model: str
    tenant: str
    corpora: tuple[str, ...]

    @classmethod
    def of(cls, service: Service, tenant: str) -> ModelNames:
        """The names of this tenant now."""
        return cls(service.model, tenant, service.corpora(tenant))

    @property
    def names(self) -> tuple[str, ...]:
        """The model, and the model with each corpus to retrieve from."""
        return (self.model, *(f"{self.model}{CORPUS}{name and ':'}{name}" for name in self.corpora))

    def corpus_of(self, name: str) -> str | None:
        """The corpus that one of the `names` names; None for the model alone."""
        suffix = name.removeprefix(self.model)
        return suffix.removeprefix(CORPUS).removeprefix(":") if suffix else None


def unknown_model(name: object, names: Iterable[str]) -> ApiError:
    """There are only models of these names."""
    return refuse(f"the model {shown(name)} does not exist; there are: {', '.join(names)}", "model", _NO_MODEL, 404)


def requests_of(body: ChatBody | CompletionBody, names: ModelNames, limits: RequestLimits) -> list[Request]:
    """One request for each prompt. Raises as `request_of` does."""
    request = request_of(body, names, limits)
    prompts = body.prompt if isinstance(body, CompletionBody) else [None]
    return [replace(request, prompt=prompt) for prompt in prompts]


def request_of(body: ChatBody | CompletionBody, names: ModelNames, limits: RequestLimits) -> Request:
    """The request for the service, of the first prompt. Raises `ApiError`, or `ConfigError` for invalid sampling."""
    _check_combinations(body)
    options = body.kvblend or OwnBody()
    top_k, corpus = _retrieval(body.model or names.model, options, names, limits.top_k)
    if isinstance(body, CompletionBody):
        sources = {"documents": body.documents, "kvblend.retrieve": options.retrieve, "model": top_k is not None}
        if name := next((name for name, source in sources.items() if source), None):
            raise refuse(f"{name} brings documents to a completion; ask /v1/chat/completions", name)
    if names.tenant and (options.priority or 0) < 0:
        message = "a key with a tenant may not be more urgent than others; give a priority of 0 or more"
        raise refuse(message, "kvblend.priority", "forbidden", 403)
    max_tokens = body.max_tokens
    if isinstance(body, ChatBody):
        max_tokens = body.max_completion_tokens or max_tokens
    biases = body.logit_bias or {}
    fields = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    sampling = Sampling(
        max_tokens=max_tokens or limits.answer_tokens,
        logprobs=body.wanted_logprobs,
        logit_bias={int(token): bias for token, bias in biases.items()},
        **fields,
    )
    question: dict[str, Any] = {}
    if isinstance(body, ChatBody):
        question["messages"] = messages_of(body.messages)
        question["tools"] = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        question["schema"] = schema_of(body.response_format)
        question["template"] = body.template
    else:
        question["prompt"] = body.prompt[0]
    documents = [_document(number, document) for number, document in enumerate(body.documents or ())]
    return Request(
        **question,
        tenant=names.tenant,
        user=digest_of_user(body.safety_identifier or body.user),
        session=options.session or "",
        documents=tuple(documents),
        top_k=top_k,
        corpus=corpus,
        sampling=sampling,
        stop=tuple(body.stop or ()),
        method=options.method or "blend",
        cold=bool(options.cold),
        priority=options.priority or 0,
        deadline_s=options.deadline_s,
        quality=options.quality,
        trace=bool(options.trace),
        verify=bool(options.verify),
    )


def digest_of_user(name: str | None) -> str:
    """A digest of the end user's name, which need not be known here; "" without one."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() if name else ""


def _check_combinations(body: ChatBody | CompletionBody) -> None:
    """Refuse fields that contradict each other, and fields that need a missing one."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options is for streams; set stream to true or leave it out", "stream_options")
    prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    several = (body.n or 1) > 1 or prompts > 1
    if several and body.kvblend is not None and body.kvblend.verify:
        raise refuse("one answer to one prompt can be verified; ask them one by one", "kvblend.verify")
    if not isinstance(body, ChatBody):
        return
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs to be true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens and max_completion_tokens differ; give one", "max_tokens")


def _document(number: int, document: DocumentBody) -> GivenDocument:
    place = f"documents[{number}]"
    if document.text is None and document.id is None:
        raise refuse(f"{place} needs a text, or the id of a document that is known", place)
    if document.text is not None and not document.text.strip():
        raise refuse(f"{place}.text is empty; give a text, or leave the document out", f"{place}.text")
    if document.text is None and document.title is not None:
        raise refuse(f"{place} is known by its id and has its title there; leave title out", f"{place}.title")
    return document.given


def _retrieval(
    model: str,
    options: OwnBody,
    names: ModelNames,
    default_k: int,
) -> tuple[int | None, str]:
    """How many chunks to retrieve (None for none) and the corpus, from the model's name and the field `kvblend`."""
    if model not in names.names:
        raise unknown_model(model, names.names)
    corpora = {
        "model": names.corpus_of(model),
        "kvblend.corpus": options.corpus,
        "kvblend.retrieve.corpus": options.retrieve.corpus if options.retrieve else None,
    }
    named = {field: name for field, name in corpora.items() if name is not None}
    field, corpus = next(iter(named.items()), ("kvblend.retrieve.corpus", ""))
    for other_field, name in named.items():
        if name != corpus:
            raise refuse(f"{other_field} names another corpus than {field}", other_field)
    if (named or options.retrieve) and corpus not in names.corpora:
        existing = ", ".join(map(in_words, names.corpora))
        if not existing:
            raise refuse("no document is indexed yet: add some, or ask without retrieval", field, _NO_CORPUS)
        missing = f"no corpus {shown(corpus)}" if corpus else "no corpus without a name"
        raise refuse(f"there is {missing}; there are: {existing}", field, _NO_CORPUS)
    if options.retrieve is not None:
        return options.retrieve.top_k or default_k, corpus
    return None if corpora["model"] is None else default_k, corpus
