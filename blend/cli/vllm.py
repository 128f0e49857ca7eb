"""`blend vllm`: the process that blends prompts for vLLM."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from typing import Any

import click

from blend.cli import opening, options
from blend.cli.options import NAME, number
from blend.errors import ConfigError, UnsupportedModelError
from blend.integrations.vllm.transport import SOCKET, TransportError, bind, close, request
from blend.serve.limits import KV_BUDGET

_EXTRA = ("starlette", "pydantic", "prometheus_client")
_ANSWERS_S = 5.0  # a process that is asked for its status


class _NotUsedError(click.ClickException):
    exit_code = 3


@click.command("vllm", cls=options.Command)
@click.option(
    "--socket",
    type=NAME,
    default=SOCKET,
    show_default=True,
    envvar="KVBLEND_VLLM_SOCKET",
    show_envvar=True,
    help="Where vLLM's processes ask: @NAME, of which nothing is left behind, or the path of a socket.",
)
@click.option(
    "--status",
    is_flag=True,
    help="Print what the process at --socket holds, as one JSON object, and end: with 0 where it answers, with 3 "
    "where it answers and vLLM refuses its KV, else with 1.",
)
@number("held_budget", "Shared memory for blended prompts that vLLM answers.", KV_BUDGET / 1e9, metavar="GB")
@options.engine
@options.all_corpora
@options.blending
def command(**values: Any) -> None:
    """Blend prompts for vLLM on this machine, which decodes them.

    vLLM is started with kvblend's connector and middleware; docs/vllm.md says how. Both hold the same model and compute in the
    same dtype: --dtype auto takes vLLM's own default, the checkpoint's dtype. Give both the same --dtype otherwise. SIGTERM and
    Ctrl-C end the process; vLLM then prefills by itself.
    """
    if values["status"]:
        _status(values["socket"])
        return
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ConfigError(f"blending for vLLM needs {', '.join(missing)}: pip install 'kvblend[serve]'")
    opening.check(values)
    place = bind(values["socket"])
    try:
        _serve(values, place)
    finally:
        close(place, values["socket"])


def _status(socket: str) -> None:
    """Light, because probes ask every few seconds: it loads no model and opens no store."""
    import json

    from blend.cli.console import say

    try:
        status, _ = request(socket, {"holding": True}, _ANSWERS_S)
    except TransportError as error:
        raise click.ClickException(str(error)) from None
    say(json.dumps(status))
    if status.get("refused"):
        raise _NotUsedError(f"vLLM does not use blended KV: {status['refused']}")


def dtype_of_vllm(model: str) -> str:
    """The dtype of vLLM without --dtype: the checkpoint's, or bfloat16 for a checkpoint of 32 bits."""
    from blend.cli.console import fetch_progress
    from blend.cli.opening import check_model
    from blend.model.outline import read_config
    from blend.weights import resolve_model

    check_model(model)
    config = read_config(str(resolve_model(model, progress=fetch_progress())), model).get_text_config(decoder=True)
    dtype = str(config.dtype).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "bfloat16"


def _serve(values: dict[str, Any], place: Any) -> None:
    import sys

    from blend.cli.console import note, say
    from blend.cli.serve import make_service
    from blend.integrations.vllm.server import PrefillServer, PrefillService
    from blend.integrations.vllm.transport import KVPool
    from blend.serve.http.connections import raise_descriptor_limit
    from blend.serve.http.requests import log_to_stderr
    from blend.serve.limits import RequestLimits

    log_to_stderr(requests=False)
    raise_descriptor_limit()
    values = {**values, "model": opening.model_of(values)}
    dtype = dtype_of_vllm(values["model"]) if values["dtype"] == "auto" else values["dtype"]
    service = make_service({**values, "full": False, "dtype": dtype})
    try:
        if service.tenant("").rag().decoder.recurrent:
            raise UnsupportedModelError(
                f"{values['model']} has recurrent layers, whose states cannot be handed to vLLM; use `blend serve`"
            )
        service.warm_up()
        pool = KVPool(round(values["held_budget"] * 1e9))
        server = PrefillServer(PrefillService(service, pool, RequestLimits(top_k=values["top_k"])), pool, place)
        server.stop_at(signal.SIGINT, signal.SIGTERM)
        say(f"Ready at {values['socket']}")
        sys.stdout.flush()
        server.serve_until_stopped()
        note("stopped")
    finally:
        service.close()
