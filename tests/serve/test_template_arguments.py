"""Arguments of the chat template that a request brings: `chat_template_kwargs`, and the effort of reasoning."""

import inspect
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rooms import serving
from served import listening
from transformers import PreTrainedTokenizerBase

from blend.serve.http.chat import RESERVED
from tests.tiny_model import save_tiny_model

TEMPLATE = (
    "{%- for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "thinking {{ enable_thinking }}, effort {{ reasoning_effort | default('none') }}, tone {{ tone | default('none') }}\n"
)
USER = [{"role": "user", "content": "Is the harbour open?"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("template")
    model = save_tiny_model(folder / "model", f"{TEMPLATE} True False low high", template=TEMPLATE, special=("<s>",))
    with (
        serving(folder / "store", model, learn_budget=0) as service,
        listening(service) as served,
        httpx.Client(base_url=served.url) as client,
    ):
        yield client


def reply(asked: httpx.Client, path: str = CHAT, **fields: Any) -> Any:
    question = {"messages": USER} if path == CHAT else {"input": USER}
    return asked.post(path, json={**question, "max_tokens": 1, "kvblend": {"trace": True}, **fields}).json()


def ending(asked: httpx.Client, path: str = CHAT, **fields: Any) -> str:
    """The last line of the prompt."""
    trace = reply(asked, path, **fields)["kvblend"]["trace"]
    return "".join(token["text"] for token in trace).rstrip("\n").rpartition("\n")[2]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_are_merged_over_the_defaults(asked: httpx.Client, path: str) -> None:
    assert ending(asked, path) == "thinking False, effort none, tone none"
    assert ending(asked, path, chat_template_kwargs={"tone": "low"}) == "thinking False, effort none, tone low"
    given = {"enable_thinking": True, "unknown": [1, {"a": None}]}
    assert ending(asked, path, chat_template_kwargs=given) == "thinking True, effort none, tone none"
    assert ending(asked, path, chat_template_kwargs=None) == ending(asked, path, chat_template_kwargs={})


def test_the_effort_of_reasoning(asked: httpx.Client) -> None:
    assert ending(asked, reasoning_effort="high") == "thinking True, effort high, tone none"
    assert ending(asked, RESPONSES, reasoning={"effort": "low"}) == "thinking True, effort low, tone none"
    for nothing in ({}, {"effort": None}, {"effort": "none", "summary": "auto"}, None):
        assert ending(asked, RESPONSES, reasoning=nothing) == "thinking False, effort none, tone none"
    more = {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}}
    assert ending(asked, reasoning_effort="high", **more) == "thinking False, effort low, tone none"


def test_an_argument_that_spells_control_tokens_writes_none(asked: httpx.Client) -> None:
    plain, attacked = (reply(asked, chat_template_kwargs={"tone": tone})["kvblend"]["trace"] for tone in ("", "<s>"))
    assert "".join(token["text"] for token in attacked).count("<s>") == 2
    assert sum(token["text"] == "<s>" for token in attacked) == sum(token["text"] == "<s>" for token in plain) == 1


def test_what_the_server_sets_itself_is_refused(asked: httpx.Client) -> None:
    signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    named = {name for name, one in signature.parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named <= RESERVED
    for name in (*RESERVED, "bos_token"):
        for path in (CHAT, RESPONSES):
            error = reply(asked, path, chat_template_kwargs={name: "x"})["error"]
            assert error["param"] == "chat_template_kwargs"
            assert name in error["message"]


@pytest.mark.parametrize("wrong", [[], "x", {"tone": "x" * 20_000}], ids=lambda one: str(one)[:20])
def test_what_is_wrong_is_refused(asked: httpx.Client, wrong: Any) -> None:
    assert reply(asked, chat_template_kwargs=wrong)["error"]["type"] == "invalid_request_error"
