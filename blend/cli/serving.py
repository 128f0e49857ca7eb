"""The server of `blend serve` from its start to its end: it listens at once, loads, answers, and finishes what runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.cli import opening
from blend.cli.console import note, say

if TYPE_CHECKING:
    from blend.serve.access import ApiKeys
    from blend.serve.http.state import AppState
    from blend.serve.http.tracing import Tracing
    from blend.serve.service import Service


def serve(given: dict[str, Any], tenants: ApiKeys) -> None:
    """Until a signal ends it. Raises what keeps it from listening or loading."""
    from blend.serve.http.app import make_app
    from blend.serve.http.log import log_to_stderr
    from blend.serve.http.server import Server, listen, raise_descriptor_limit, url_of
    from blend.serve.limits import RequestLimits
    from blend.serve.metrics import Metrics

    limits = RequestLimits(
        body_bytes=_bytes(given["body_limit"], 1e6),
        upload_bytes=_bytes(given["upload_limit"], 1e6),
        all_bytes=_bytes(max(given["body_budget"], given["body_limit"] / 1e3, given["upload_limit"] / 1e3)),
        answer_tokens=given["max_new_tokens"],
        top_k=given["top_k"],
        any_host=given["no_api_key"],
        origins=given["allow_origin"],
    )
    raise_descriptor_limit()
    with listen(given["host"], given["port"]) as place:
        log_to_stderr(requests=not given["quiet"])
        app = make_app(None, tenants, limits, Metrics())
        tracing = app.state.shared.tracing = _tracing()
        loading = _Loading(given, app.state.shared, url_of(place))
        server = Server(app, place, grace_s=given["grace"], on_started=loading.start)
        loading.on_failure = server.stop
        server.serve_until_stopped()
        if tracing is not None:
            tracing.close()
    loading.finish()


def _tracing() -> Tracing | None:
    """Spans, where the environment names an endpoint for them."""
    from blend.serve.http.tracing import ENDPOINTS, exporting, is_installed, is_wanted

    if not is_wanted(os.environ):
        return None
    if not is_installed():
        note(f"no spans are sent, though {' or '.join(ENDPOINTS)} is set: pip install 'kvblend[otel]'")
        return None
    return exporting(os.environ)


class _Loading(threading.Thread):
    """Loads the model beside the server, so that who watches it sees that it lives, and a signal ends it at any time."""

    def __init__(self, given: dict[str, Any], state: AppState, url: str) -> None:
        super().__init__(name="kvblend-loading", daemon=True)
        self._given, self.state, self._url = given, state, url
        self.on_failure: Callable[[], None] = lambda: None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            service = make_service(self._given)
            self.state.service = service
            service.warm_up()
            if self.state.closing:
                service.close()
            else:
                say(f"Ready at {self._url}")
                sys.stdout.flush()
        except BaseException as error:  # told by the main thread, which ends the process
            self._error = error
            self.on_failure()

    def finish(self) -> None:
        """Raise what went wrong; end the process when it is still at it."""
        if self._error is not None:
            raise self._error
        if self.is_alive():
            note("stopped while loading")
            sys.stdout.flush()
            os._exit(0)  # a thread in the middle of a library's own code does not end, and would crash an ordinary exit


def make_service(given: dict[str, Any]) -> Service:
    """The decoder behind a service, from parsed options; "full", "prefix_budget" and so on among them."""
    rag = opening.open_all_corpora(given)
    from blend.model.cpu import take_threads
    from blend.serve.embedded import EmbeddedEngine
    from blend.serve.service import PrefillProfile, Service

    decoder = rag.decoder
    note(f"Warming up {decoder.name} ...")
    profile = PrefillProfile(decoder)
    profile.measure()
    engine = EmbeddedEngine(
        rag.blender,
        blender_of=lambda tenant, corpus: service.tenant(tenant).rag(corpus).blender,
        most_running=given["most_running"],
        most_waiting=given["most_waiting"],
        kv_budget=_bytes(given["kv_budget"]),
        prefix_budget=_bytes(given["prefix_budget"]),
        remember=not given["full"],
        on_pass=profile.saw,
    )
    # The cores are the engine's. With helper threads for the others there would be more threads than cores, and GNU's OpenMP
    # then lets the engine's own helpers sleep between operations: passes take two to three times as long.
    take_threads(1)
    learn = 0 if given["no_learn"] else _bytes(given["learn_budget"])
    service = Service(rag, engine, learn_budget=learn, full=given["full"], profile=profile)
    if Path(rag.model).is_dir():
        service.model = Path(rag.model).resolve().name  # where it lies is nobody's business
    return service


def _bytes(size: float, unit: float = 1e9) -> int:
    return round(size * unit)
