"""The page's files: all that it names is there, and nothing else can be reached."""

from __future__ import annotations

import re

import httpx


def test_the_page_and_all_that_it_names(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="page/([^"]+)"', page.text)
    assert {"app.js", "frame.css"} <= set(names)
    for name in names:
        kind = http.get(f"/page/{name}").headers["content-type"]
        assert kind.partition(";")[0] in ("text/javascript", "text/css", "image/svg+xml")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son[a-z]+=", page.text), "nothing inline"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"


def test_nothing_else_is_given_out(http: httpx.Client) -> None:
    for path in (
        "/page/",
        "/page/none.js",
        "/page/../http/app.py",
        "/page/%2e%2e/service.py",
        "/page/__init__.py",
        "/docs",
    ):
        response = http.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
