"""Pages of other sites in somebody's browser: kept out, and let in where the operator says so."""

from __future__ import annotations

import httpx
import pytest
from served import Served, listening

from blend.errors import ConfigError
from blend.serve.access import ApiKeys, is_loopback, origin_of

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
        ({"host": "localhost:80"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "127.0.0.2:80", "origin": "http://127.0.0.2:80"}, 200),
    ],
)
def test_pages_of_other_sites_do_not_come_in(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    assert http.get(MODELS, headers=headers).status_code == status
    assert http.get(MODELS, headers={"origin": str(http.base_url).rstrip("/")}).status_code == 200


def test_names_of_others_do_not_come_in_whatever_address_it_listens_at(served: Served) -> None:
    with listening(served.state.service, host="127.0.0.2") as elsewhere:
        assert httpx.get(f"{elsewhere.url}{MODELS}").status_code == 200
        foreign = {"host": "evil.example", "origin": "http://evil.example"}
        response = httpx.get(f"{elsewhere.url}{MODELS}", headers=foreign)
        assert response.status_code == 403
        assert "--api-key" in response.json()["error"]["message"]
        elsewhere.state.service = None  # the other server's


def test_a_site_that_is_permitted_may_ask_and_no_other(served: Served) -> None:
    with listening(served.state.service, ApiKeys([("anns", "ann")]), origins=(SITE,)) as open_to_one:

        def call(method: str, origin: str, **headers: str) -> httpx.Response:
            return httpx.request(method, f"{open_to_one.url}{MODELS}", headers={"origin": origin, **headers})

        wish = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-os",
        }
        asked = call("OPTIONS", SITE, **wish)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == SITE
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == wish["access-control-request-headers"]
        answered, refused = call("GET", SITE, authorization="Bearer anns"), call("GET", SITE)
        assert (answered.status_code, refused.status_code) == (200, 401)
        for response in (answered, refused):  # a script is to read why, too
            assert response.headers["access-control-allow-origin"] == SITE
        for other in ("https://evil.example", "https://rag.example.org.evil.example", "http://rag.example.org", "null"):
            for response in (call("OPTIONS", other, **wish), call("GET", other, authorization="Bearer anns")):
                assert response.status_code in (400, 403)
                assert "access-control-allow-origin" not in response.headers
            told = response.json()["error"]["message"]
            assert told.startswith(f"pages of '{other}' may not ask this server, not with a key either")
            assert "--allow-origin" in told
            assert "\n" not in told
        open_to_one.state.service = None  # the other server's


def test_nothing_is_said_of_origins_where_none_is_permitted(http: httpx.Client) -> None:
    response = http.get(MODELS, headers={"origin": str(http.base_url).rstrip("/")})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://rag.example.org", SITE),
        ("HTTPS://Rag.Example.ORG:443/", SITE),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_origins_are_written_as_browsers_write_them(given: str, origin: str) -> None:
    assert origin_of(given) == origin


@pytest.mark.parametrize(
    "given", ["*", "null", "", "rag.example.org", "https://*.a.org", "https://a.org/b", "https://u@a.org"]
)
def test_what_is_no_origin(given: str) -> None:
    with pytest.raises(ConfigError, match="is no origin: give scheme and host alone"):
        origin_of(given)


def test_what_is_this_machines_own() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.0.0.2", "127.255.0.1", "::1")))
    assert not any(map(is_loopback, ("", "localhost.evil.example", "0.0.0.0", "10.0.0.1", "::", "128.0.0.1", "127.1")))
