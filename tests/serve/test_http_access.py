"""API keys, tenants, origins, the log, and the files of the page."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from changing import until
from served import CHAT, Served, listening, logged, refusal

from blend.errors import ConfigError
from blend.serve.events import EngineStats
from blend.serve.failures import LOG
from blend.serve.http.keys import ApiKeys, read_keys
from blend.serve.metrics import Metrics, StoreFigures
from blend.store import MemoryStats
from blend.store.backend import TierHits
from blend.text import origin_of

SECRET = [{"role": "user", "content": "a secret of mine"}]


def test_keys(locked: Served) -> None:
    assert [locked.ask(key).status_code for key in ("common", "anns", "bobs")] == [200] * 3
    basic = locked.send("POST", CHAT, headers={"authorization": "Basic anns"}, json={})
    for refused in (locked.ask(), locked.ask("other"), locked.ask("ann"), basic):
        assert refusal(refused) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for path, status in (("/v1/models", 401), ("/health", 200), ("/ready", 200)):
        assert locked.send("GET", path).status_code == status
    for key, status in (("common", 200), ("anns", 403), ("none", 401)):  # metrics are for the operator
        assert locked.send("GET", "/metrics", key).status_code == status


def test_tenants_may_stand_back_and_not_push_ahead(locked: Served) -> None:
    for key, priority in (("anns", 0), ("anns", 5), ("common", -5)):
        assert locked.ask(key, kvblend={"priority": priority}).status_code == 200
    refused = locked.ask("anns", kvblend={"priority": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "kvblend.priority")


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("first\n# who may\n\nsecond ann # hers\n  third\tbob\n", encoding="utf-8-sig")
    keys = ApiKeys(read_keys(file))
    expected = {"first": "", "second": "ann", "third": "bob", "fourth": None, "": None, None: None}
    assert {key: keys.tenant_of(key) for key in expected} == expected
    assert ApiKeys().tenant_of(None) == ApiKeys().tenant_of("any") == ""
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        read_keys(file)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"a b c\n", "keys:1: a line is"),
        (b"x\nkey Ann\n", "keys:2: 'Ann' cannot name a corpus"),
        ("k\u00e9y\n".encode(), "keys:1: an API key is"),
        (b"# none\n", "holds none"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_a_file_of_keys_that_is_none(tmp_path: Path, data: bytes, told: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=told):
        read_keys(file)


def test_a_key_has_one_tenant() -> None:
    with pytest.raises(ConfigError, match="two tenants"):
        ApiKeys([("same", "ann"), ("same", "bob")])


def test_health_and_readiness(served: Served) -> None:
    with listening(None, shared=True) as loading:
        assert loading.send("GET", "/health").status_code == 200
        for response in (loading.send("GET", "/ready"), loading.ask(), loading.send("GET", "/v1/models")):
            assert refusal(response) == (503, "loading")
            assert response.headers["retry-after"]
        loading.state.service = served.state.service
        assert loading.send("GET", "/ready").status_code == loading.ask().status_code == 200


def test_what_is_counted(served: Served) -> None:
    before = served.counts()
    figures = served.ask(kvblend={"retrieve": {"top_k": 3}}).json()["kvblend"]["figures"]
    assert served.ask(store=True).status_code == 400
    assert served.send("GET", f"/nowhere/{'x' * 50}").status_code == 404
    after = served.counts()
    once = (
        *("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_count"),
        *('request_success_total{finished_reason="length"}', 'errors_total{kind="unsupported_parameter"}'),
        *(f'http_requests_total{{path="{CHAT}",status="{status}"}}' for status in (200, 400)),
        'http_requests_total{path="other",status="404"}',
    )
    expected = {
        **dict.fromkeys(once, 1),
        "generation_tokens_total": 2,
        "prompt_tokens_total": figures["rows"],
        "rows_prompt_total": figures["rows"],
        "rows_recomputed_total": figures["rows_computed"],
        "bytes_loaded_total": figures["bytes_loaded"],
        'chunk_hits_total{tier="store"}': 3,
        "chunk_misses_total": 0,
    }
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected
    assert figures["bytes_loaded"] > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[name] == 0
    assert after["prefix_bytes"] > 0, "the prompt is kept for those that begin like it"
    assert after["process_resident_memory_bytes"] > 1e8


def test_each_tier_counts_for_itself() -> None:
    """Memory alone, then the tiers of several stores together."""
    page = Metrics().page(None, StoreFigures(MemoryStats(5, 2, 1, 3, 100, 1000))).decode()
    hits = ('chunk_hits_total{tier="memory"} 5', 'chunk_hits_total{tier="store"} 2')
    for line in (*hits, 'evictions_total{tier="memory"} 1', "chunk_memory_bytes 100"):
        assert f"kvblend_{line}.0" in page
    assert "store_lookups" not in page, "the store has one tier"
    found = ((TierHits(1, 2, 3, 4, 50), 6), (TierHits(10, 20, 30, 40, 500), 60), (None, 600))
    stores: Any = [
        SimpleNamespace(backend=SimpleNamespace(tier_hits=hits, evictions=evictions), memory=None)
        for hits, evictions in found
    ]
    page = Metrics().page(EngineStats(0, 0, 0, 1, prefix_evictions=7), StoreFigures.of(stores)).decode()
    tiers = enumerate(("disk", "hot", "far", "none"), 1)
    lookups = [f'store_lookups_total{{tier="{tier}"}} {11 * number}' for number, tier in tiers]
    evictions = ('evictions_total{tier="store"} 666', 'evictions_total{tier="prefixes"} 7')
    for line in (*lookups, "store_fetched_bytes_total 550", *evictions):
        assert f"kvblend_{line}.0" in page


def test_the_log_has_nobodys_text(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"messages": SECRET, "max_tokens": 2}
    with caplog.at_level(logging.INFO, logger=LOG.name):
        answered, other = (
            served.send("POST", CHAT, json=asked, headers={"x-request-id": one}) for one in ("mine-1", "not {allowed}")
        )
        # The line is written after the answer: while the log still takes it.
        until(lambda: len([one for one in caplog.records if one.name == LOG.name]) == 2)
    assert answered.headers["x-request-id"] == "mine-1"
    assert len(other.headers["x-request-id"]) == 32
    told = [logged(record) for record in caplog.records if record.name == LOG.name]
    assert told[0].items() >= {"id": "mine-1", "method": "POST", "path": CHAT, "status": 200}.items()
    assert told[0]["seconds"] >= told[0]["ttft_s"] > 0
    assert told[0]["rows"] > 0
    text = answered.json()["choices"][0]["message"]["content"]
    assert not any(part in json.dumps(told) for part in ("secret", text))


def test_what_asyncio_tells_is_a_line_without_anybodys_text() -> None:
    message = "Exception in callback say('a secret')\nhandle: <Handle say('a secret')>"
    told = logged(logging.LogRecord("asyncio", logging.ERROR, "", 0, message, None, None))
    assert (told["level"], told["event"]) == ("error", "asyncio: Exception in callback say")


def test_a_bug_is_told_without_words_of_anybody(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise KeyError("a secret of mine")

    monkeypatch.setattr(served.state.service, "take", broken)
    with caplog.at_level(logging.INFO, logger=LOG.name):
        response = served.ask(messages=SECRET)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"]
    (told,) = [logged(record) for record in caplog.records if record.levelname == "ERROR"]
    assert told["error"] == "KeyError"
    assert any("test_http_access.py" in place for place in told["at"])
    assert "secret" not in response.text + json.dumps(told)


MODELS, SITE = "/v1/models", "https://rag.example.org"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": SITE, "sec-fetch-site": "same-site"}, 403),
        ({"origin": SITE, "sec-fetch-site": "same-origin"}, 200),  # a proxy rewrote Host
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:80"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 403),
        ({"host": "0.0.0.0:80"}, 403),
        ({"host": "localhost:80"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "127.0.0.2:80", "origin": "http://127.0.0.2:80"}, 200),
    ],
)
def test_pages_of_other_sites_do_not_come_in(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    assert http.get(MODELS, headers=headers).status_code == status


def test_the_servers_own_page_comes_in(http: httpx.Client) -> None:
    mine = http.get(MODELS, headers={"origin": str(http.base_url).rstrip("/")})
    assert mine.status_code == 200
    assert not [name for name in mine.headers if name.startswith("access-control")], "where no origin is permitted"


def test_a_site_that_is_permitted_may_ask_and_no_other(listen: Callable[..., Served]) -> None:
    served = listen(ApiKeys([("anns", "ann")]), origins=(SITE,))
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    asked = served.send("OPTIONS", MODELS, headers={"origin": SITE, **wish})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == SITE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == wish["access-control-request-headers"]
    for key, status in (("anns", 200), ("", 401)):  # a script is to read why, too
        response = served.send("GET", MODELS, key, headers={"origin": SITE})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == SITE
    for other in ("https://evil.example", "https://rag.example.org.evil.example", "http://rag.example.org", "null"):
        preflight = served.send("OPTIONS", MODELS, headers={"origin": other, **wish})
        response = served.send("GET", MODELS, "anns", headers={"origin": other})
        for one in (preflight, response):
            assert one.status_code in (400, 403)
            assert "access-control-allow-origin" not in one.headers
        told = response.json()["error"]["message"]
        assert told.startswith(f"pages of '{other}' may not ask this server, not with a key either")
        assert "--allow-origin" in told


def test_origins_are_written_as_browsers_write_them() -> None:
    assert origin_of("HTTPS://Rag.Example.ORG:443/") == SITE
    assert [origin_of(url) for url in ("http://[::1]:80", "tauri://localhost")] == ["http://[::1]", "tauri://localhost"]
    for url in ("*", "null", "", "rag.example.org", "https://*.a.org", "https://a.org/b", "https://u@a.org"):
        with pytest.raises(ConfigError, match="is no origin: give scheme and host alone"):
            origin_of(url)


def test_the_page_and_all_that_it_names(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="page/([^"]+)"', page.text)
    assert {"app.js", "frame.css"} <= set(names)
    for name in names:
        kind = http.get(f"/page/{name}").headers["content-type"]
        assert kind.partition(";")[0] in ("text/javascript", "application/javascript", "text/css", "image/svg+xml")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son[a-z]+=", page.text), "nothing inline"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"


def test_scripts_are_scripts_whatever_the_system_says(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or no browser runs them: some systems' tables call them plain text."""
    monkeypatch.setattr("starlette.responses.guess_type", lambda name: ("text/plain", None))
    assert http.get("/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_nothing_else_is_given_out(http: httpx.Client) -> None:
    for path in ("", "none.js", "..%2f..%2fapp.py", "../http/app.py", "%2e%2e/service.py", "__init__.py", "../docs"):
        assert refusal(http.get(f"/page/{path}")) == (404, "not_found")
