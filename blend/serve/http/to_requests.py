"""Makes the service's requests out of the bodies of questions, and finds the corpus that a question names."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from blend.corpora import in_words
from blend.sampling import RANGES, Sampling
from blend.serve.http.bodies import CommonBody, CompletionBody, DocumentBody
from blend.serve.http.errors import ApiError, refuse
from blend.serve.limits import RequestLimits
from blend.serve.request import GivenDocument, Request
from blend.text import shown

if TYPE_CHECKING:
    from blend.serve.service import Service

_SAMPLING = ("seed", "ignore_eos", *RANGES.keys() - {"max_tokens", "logprobs"})
"""Fields of a body and of `Sampling` with the same meaning."""
_OPTIONS = ("session", "method", "cold", "edits", "priority", "deadline_s", "quality", "trace", "verify")
"""Fields of `kvblend` and of `Request` with the same meaning."""
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


def requests_of(body: CommonBody, names: ModelNames, limits: RequestLimits) -> list[Request]:
    """One request for each prompt. Raises `ApiError`."""
    options = body.kvblend
    prompts = body.prompts()
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options is for streams; set stream to true or leave it out", "stream_options")
    if body.best_of not in (1, body.n):  # all answers that are computed are sent
        raise refuse(f"best_of = {body.best_of} is not supported; leave it out", "best_of", "unsupported_parameter")
    if options.verify and body.n * len(prompts) > 1:
        raise refuse("one answer to one prompt can be verified; ask them one by one", "kvblend.verify")
    if names.tenant and options.priority < 0:
        message = "a key with a tenant may not be more urgent than others; give a priority of 0 or more"
        raise refuse(message, "kvblend.priority", "forbidden", 403)
    top_k, corpus = _retrieval(body, names, limits.top_k)
    if isinstance(body, CompletionBody):
        sources = {"documents": body.documents, "kvblend.retrieve": options.retrieve, "model": top_k is not None}
        if name := next((name for name, source in sources.items() if source), None):
            raise refuse(f"{name} brings documents to a completion; ask /v1/chat/completions", name)
    sampling = Sampling(
        max_tokens=body.longest or limits.answer_tokens,
        logprobs=body.wanted_logprobs,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        **{name: getattr(body, name) for name in _SAMPLING},
    )
    common = {
        "tenant": names.tenant,
        "user": digest_of_user(body.end_user),
        "marks": body.marks,
        "documents": tuple(_given(*numbered) for numbered in enumerate(body.documents)),
        "top_k": top_k,
        "corpus": corpus,
        "sampling": sampling,
        "stop": tuple(body.stop),
        **{name: getattr(options, name) for name in _OPTIONS},
    }
    return [Request(**prompt, **common) for prompt in prompts]


def digest_of_user(name: str) -> str:
    """A digest of the end user's name, which need not be known here; "" without one."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() if name else ""


def _given(number: int, document: DocumentBody) -> GivenDocument:
    place = f"documents[{number}]"
    if document.text is None and not document.id:
        raise refuse(f"{place} needs a text, or the id of a document that is known", place)
    if document.text is None and document.title:
        raise refuse(f"{place} is known by its id and has its title there; leave title out", f"{place}.title")
    if document.text is not None and not document.text.strip():
        raise refuse(f"{place}.text is empty; give a text, or leave the document out", f"{place}.text")
    return GivenDocument(document.text or "", document.title, document.id)


def _retrieval(body: CommonBody, names: ModelNames, default_k: int) -> tuple[int | None, str]:
    """How many chunks to retrieve (None for none) and the corpus, from the model's name and the field `kvblend`."""
    model = body.model or names.model
    if model not in names.names:
        raise unknown_model(model, names.names)
    retrieve = body.kvblend.retrieve
    of_model = names.corpus_of(model)
    corpora = {
        "model": of_model,
        "kvblend.corpus": body.kvblend.corpus,
        "kvblend.retrieve.corpus": retrieve.corpus if retrieve else None,
    }
    named = {field: name for field, name in corpora.items() if name is not None}
    field, corpus = next(iter(named.items()), ("kvblend.retrieve.corpus", ""))
    for other_field, name in named.items():
        if name != corpus:
            raise refuse(f"{other_field} names another corpus than {field}", other_field)
    if (named or retrieve) and corpus not in names.corpora:
        existing = ", ".join(map(in_words, names.corpora))
        if not existing:
            raise refuse("no document is indexed yet: add some, or ask without retrieval", field, _NO_CORPUS)
        absent = f"no corpus {shown(corpus)}" if corpus else "no corpus without a name"
        raise refuse(f"there is {absent}; there are: {existing}", field, _NO_CORPUS)
    if retrieve is not None:
        return retrieve.top_k or default_k, corpus
    return None if of_model is None else default_k, corpus
