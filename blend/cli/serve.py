"""`blend serve`: options, and the server, which listens at once, loads, answers, and finishes running requests."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options, upstream
from blend.cli.console import note, say, warnings_as_notes
from blend.cli.options import FOLDER, NAME, PLACE, TEXT, Parsed, number
from blend.cli.upstream import upstream_url
from blend.config import ANSWER_TOKENS
from blend.errors import ConfigError, StoreUnreachableError
from blend.serve.limits import BODY_BUDGET
from blend.text import is_loopback, origin_of
from blend_retrieval.installation import install_command

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from blend.serve.events import Audit
    from blend.serve.http.keys import ApiKeys
    from blend.serve.http.state import AppState
    from blend.serve.http.tracing import Tracing
    from blend.serve.limits import RequestLimits
    from blend.serve.service import Service

_EXTRA = ("starlette", "uvicorn", "pydantic", "prometheus_client", "python_multipart", "pythonjsonlogger", "llguidance")


@click.command("serve", cls=options.Command)
@click.option("--host", type=NAME, default="127.0.0.1", show_default=True, help="Address to listen at.")
@number("port", "Port to listen at; 0 takes a free one.", 8000)
@click.option(
    "--api-key",
    "api_key",
    type=TEXT,
    multiple=True,
    envvar="KVBLEND_API_KEY",
    show_envvar=True,
    help="A key that requests must carry; may be given more than once. Every user of the machine can read "
    "a command line.",
)
@click.option("--api-keys", type=PLACE, help="File of keys, one a line; a name behind a key gives it separate corpora.")
@click.option("--no-api-key", is_flag=True, help="Answer without a key, also to other machines.")
@click.option(
    "--allow-origin",
    type=Parsed("url", origin_of),
    multiple=True,
    metavar="URL",
    help="A site whose pages may ask from a browser, such as https://rag.example.org; may be given more than once.",
)
@click.option(
    "--upstream",
    type=Parsed("url", upstream_url),
    metavar="URL",
    help="Stand in front of the llama-server there, which answers; see docs/llama_server.md.",
)
@click.option("--slots", type=FOLDER, help="With --upstream: the folder of llama-server's --slot-save-path.")
@click.option("--full", is_flag=True, help="Never blend: full prefill for all, for comparison.")
@options.engine
@number("audit", "Share of blended answers to compare with full recompute when the server is idle.", 0.0)
@number("body_limit", "Largest request.", 16, metavar="MB")
@number("upload_limit", "Largest request that adds documents.", 64, metavar="MB")
@number(
    "body_budget", "Memory for the bodies of all requests that are being received.", BODY_BUDGET / 1e9, metavar="GB"
)
@number("max_new_tokens", "Longest answer where the request does not say.", ANSWER_TOKENS)
@number("grace", "Time to finish what runs when the server is stopped.", 30, metavar="SECONDS")
@click.option("-q", "--quiet", is_flag=True, help="Log what fails, not every request.")
@options.all_corpora
@options.blending
@options.reproducible
@click.pass_context
def command(context: click.Context, /, **values: Any) -> None:
    """Answer many at once over HTTP, in the protocol of OpenAI's clients.

    The address is printed when questions are taken. Documents come with the question, out of the store's corpora, or pasted
    into a message. SIGTERM and Ctrl-C end the server when the answers that run are finished.
    """
    _require_extra()
    upstream.check(values, context.get_parameter_source)
    tenants = _tenants(values["api_key"], values["api_keys"])
    _check_host(values["host"], tenants, insisted=values["no_api_key"])
    opening.check(values)
    serve(values, tenants)


def _require_extra() -> None:
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}: {install_command('serve')}")


def _tenants(keys: Sequence[str], file: Path | None) -> ApiKeys:
    """Who may ask. Notes when others can read the file of keys."""
    from blend.serve.http.keys import ApiKeys, read_keys

    with warnings_as_notes():
        return ApiKeys([*((key, "") for key in keys), *(read_keys(file) if file is not None else ())])


def _check_host(host: str, tenants: ApiKeys, *, insisted: bool) -> None:
    if insisted and tenants.required:
        raise ConfigError("--no-api-key and API keys exclude each other: leave one of them out")
    if not (is_loopback(host) or tenants.required or insisted):
        raise ConfigError(
            f"at --host {host} other machines can ask: give keys with --api-key or --api-keys, or insist with --no-api-key"
        )


def serve(values: dict[str, Any], tenants: ApiKeys) -> None:
    """Serve until a signal. Raises errors of listening and loading."""
    from blend.serve.http.connections import raise_descriptor_limit
    from blend.serve.http.request_log import log_to_stderr
    from blend.serve.http.server import Server, listen, url_of
    from blend.serve.limits import RequestLimits

    limits = RequestLimits(
        body_bytes=_bytes(values["body_limit"], 1e6),
        upload_bytes=_bytes(values["upload_limit"], 1e6),
        all_bytes=_bytes(max(values["body_budget"], values["body_limit"] / 1e3, values["upload_limit"] / 1e3)),
        answer_tokens=values["max_new_tokens"],
        top_k=values["top_k"],
        any_host=values["no_api_key"],
        origins=values["allow_origin"],
    )
    raise_descriptor_limit()
    with listen(values["host"], values["port"]) as place:
        log_to_stderr(requests=not values["quiet"])
        app, load = (upstream.served if values["upstream"] else _served)(values, tenants, limits)
        tracing = app.state.shared.tracing = _tracing()
        loading = _Loading(load, app.state.shared, url_of(place))
        server = Server(app, place, grace_s=values["grace"], on_started=loading.start)
        loading.on_failure = server.stop
        server.serve_until_stopped()
        if tracing is not None:
            tracing.close()
    loading.finish()


def _served(values: dict[str, Any], tenants: ApiKeys, limits: RequestLimits) -> tuple[Starlette, upstream.Load]:
    """The application, and what loads its service."""
    from blend.serve.http.app import make_app
    from blend.serve.metrics import Metrics

    app = make_app(None, tenants, limits, Metrics())
    state = app.state.shared

    def load() -> Callable[[], object]:
        service = state.service = make_service(values, state.metrics.audited)
        service.warm_up()
        return service.close

    return app, load


def _tracing() -> Tracing | None:
    """Tracing, if the environment names an endpoint for spans."""
    from blend.serve.http.tracing import ENDPOINTS, exporting, is_installed, is_wanted

    if not is_wanted(os.environ):
        return None
    if not is_installed():
        note(f"no spans are sent, though {' or '.join(ENDPOINTS)} is set: {install_command('otel')}")
        return None
    return exporting()


class _Loading(threading.Thread):
    """Loads the model in a thread, so that the server answers health checks and signals meanwhile."""

    def __init__(self, load: upstream.Load, state: AppState, url: str) -> None:
        super().__init__(name="kvblend-loading", daemon=True)
        self._load = load
        self.state = state
        self._url = url
        self.on_failure: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._close: Callable[[], object] = lambda: None

    def run(self) -> None:
        try:
            self._close = self._load()
            gc.collect()
            gc.freeze()  # or collections look at the libraries' 400,000 objects, and all threads stand still for 0.3 s
            if self.state.closing:
                self._close()
            else:
                say(f"Ready at {self._url}")
                sys.stdout.flush()
        except BaseException as error:  # the main thread raises it
            self._error = error
            self.on_failure()

    def finish(self) -> None:
        """Close what was loaded, or raise the error of loading; if it is still loading, end the process."""
        if self._error is not None:
            raise self._error
        if self.is_alive():
            note("stopped while loading")
            sys.stdout.flush()
            os._exit(0)  # a thread in the middle of a library's own code does not end, and would crash an ordinary exit
        self._close()


def make_service(values: dict[str, Any], on_audit: Callable[[Audit], None]) -> Service:
    """The service with its decoder and engine."""
    rag = opening.open_rag(values)
    with suppress(StoreUnreachableError):  # it serves without its store meanwhile
        rag.store.backend.require_lasting()
    from blend.model.cpu import set_threads
    from blend.serve.engine.profile import PrefillProfile
    from blend.serve.engine.scheduler import EmbeddedEngine
    from blend.serve.service import Service

    opening.note_caveats(rag)
    opening.note_no_estimates(rag)
    decoder = rag.decoder
    note(f"Warming up {decoder.name} ...")
    profile = PrefillProfile(decoder)
    profile.measure()
    engine = EmbeddedEngine(
        rag.blender,
        blender_of=lambda tenant, corpus: service.tenant(tenant).rag(corpus).blender,
        most_running=values["most_running"],
        most_waiting=values["most_waiting"],
        kv_budget=_bytes(values["kv_budget"]),
        prefix_budget=_bytes(values["prefix_budget"]),
        remember=not values["full"],
    )
    # The cores are the engine's. With helper threads for the others there would be more threads than cores, and GNU's OpenMP
    # then lets the engine's own helpers sleep between operations: passes take two to three times as long.
    set_threads(1)
    learn = 0 if values["no_learn"] else _bytes(values["learn_budget"])
    service = Service(
        rag,
        engine,
        learn_budget=learn,
        full=values["full"],
        profile=profile,
        audit=values["audit"],
        on_audit=on_audit,
        unnamed="" if values["api_key"] or values["api_keys"] or not is_loopback(values["host"]) else "this machine",
    )
    if Path(rag.model).exists():
        service.model = Path(rag.model).resolve().name  # clients need not know its path
    return service


def _bytes(size: float, unit: float = 1e9) -> int:
    return round(size * unit)
