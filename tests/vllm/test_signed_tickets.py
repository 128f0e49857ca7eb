"""The scheduler takes up tickets of its own middleware alone: what clients get past it is worth nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blend.errors import ConfigError
from blend.integrations.vllm import network
from blend.integrations.vllm.connector import LoadScheduler
from blend.integrations.vllm.contract import Signer
from blend.integrations.vllm.prompts import blended

NAME, SALT = "f" * 32, "salt"


def config(engine: str = "an engine", **options: str) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine, kv_connector_extra_config=options))


def request(given: Any, **more: Any) -> Any:
    found = {
        "request_id": "r",
        "kv_transfer_params": given,
        "cache_salt": SALT,
        "lora_request": None,
        "prompt_token_ids": list(range(40)),
        "num_prompt_tokens": 40,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
    }
    return SimpleNamespace(**{**found, **more})


@pytest.fixture
def signer() -> Signer:
    return Signer.of(config())


@pytest.fixture
def offers(signer: Signer) -> LoadScheduler:
    return LoadScheduler(signer)


@pytest.mark.parametrize("ticket", [NAME, '{"prefix":1}'])
def test_what_the_middleware_gives_out_is_taken_up(offers: LoadScheduler, ticket: str) -> None:
    server = Signer.of(config())  # in another process
    body = blended({}, [1], {"ticket": ticket, "salt": "s"}, "/v1/chat/completions", server)
    found = request(body["kv_transfer_params"], cache_salt=body["cache_salt"])
    assert offers.ticket(found) == ticket
    assert offers.rows(found, 16) == 23
    offers.allocated(found, (1, 2, 3), 23)
    assert [load.ticket for load in offers.taken()] == [ticket]


FORGED: tuple[Any, ...] = (
    *("nonsense", [1], {"kvblend": "nonsense"}, {"kvblend": {}}, {"kvblend": {"ticket": "{}"}}),
    *({"kvblend": {"ticket": NAME}}, {"kvblend": {"ticket": NAME, "signature": "0" * 64}}),
    *({"kvblend": {"ticket": "\ud800", "signature": "0"}}, {"kvblend": {"ticket": NAME, "signature": "\ud800"}}),
    *({"kvblend": {"ticket": NAME, "signature": "\u00e9"}}, {"kvblend": {"ticket": 1, "signature": 1}}),
    *(Signer(b"another").signed(NAME, SALT), Signer.of(config("other")).signed(NAME, SALT)),
    Signer.of(config()).signed(NAME, "another salt"),
)


@pytest.mark.parametrize("given", FORGED)
def test_forged_tickets_are_refused(offers: LoadScheduler, given: Any) -> None:
    assert offers.rows(request(given), 0) == 0


@pytest.mark.parametrize("salt", ["\ud800", 7, 7.5, True, ["salt"], {"salt": 1}])
def test_a_salt_that_is_no_text_is_refused(offers: LoadScheduler, signer: Signer, salt: Any) -> None:
    found = request(signer.signed(NAME, SALT), cache_salt=salt)
    assert offers.rows(found, 0) == 0
    offers.allocated(found, (1, 2, 3), 23)
    assert not offers.taken()


def test_a_salt_of_a_client_that_is_no_unicode_text_is_mixed_in(offers: LoadScheduler, signer: Signer) -> None:
    body = blended({"cache_salt": "\ud800"}, [1], {"ticket": NAME, "salt": "s"}, "/v1/chat/completions", signer)
    assert offers.ticket(request(body["kv_transfer_params"], cache_salt=body["cache_salt"])) == NAME


def test_a_refusal_is_told_once_until_a_good_ticket_comes(
    offers: LoadScheduler, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = request(signer.signed(NAME, SALT)), request({"kvblend": {"ticket": NAME}})
    with caplog.at_level(logging.WARNING, "vllm.kvblend"):
        for one in (bad, bad, good, bad):
            offers.rows(one, 0)
    assert [record.getMessage()[:32] for record in caplog.records] == ["kvblend: a ticket is refused tha"] * 2


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": None},
        {"cache_salt": ""},
        {"lora_request": "adapter"},
        {"prompt_token_ids": None},
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
    ],
)
def test_good_tickets_of_requests_that_must_not_be_blended(offers: LoadScheduler, signer: Signer, more: Any) -> None:
    given = signer.signed(NAME, more.get("cache_salt", SALT) or "")
    assert offers.rows(request(given, **more), 0) == 0


def test_engines_of_one_server_know_each_others_signatures(signer: Signer) -> None:
    """With data parallelism vLLM appends the engine's number to its id, once or twice."""
    given = signer.signed(NAME, SALT)["kvblend"]
    for number in ("_dp0", "_dp1_dp1"):
        assert Signer.of(config(f"an engine{number}")).ticket(given, SALT) == NAME


def test_a_key_joins_engines_that_have_ids_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("a key of at least sixteen bytes\n")
    here, there = Signer.of(config("here", key=str(key))), config("there")
    given = here.signed(NAME, SALT)["kvblend"]
    assert Signer.of(there).ticket(given, SALT) is None
    monkeypatch.setenv(network.KEY_VARIABLE, str(key))
    assert Signer.of(there).ticket(given, SALT) == NAME


def test_settings_by_which_nothing_can_be_signed() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Signer.of(config(key="/nowhere"))
    with pytest.raises(ConfigError, match="this engine has no id"):
        Signer.of(config(""))
    without = SimpleNamespace(kv_transfer_config=None)
    assert Signer.of(without).ticket(Signer.of(without).signed(NAME, SALT)["kvblend"], SALT) is None
