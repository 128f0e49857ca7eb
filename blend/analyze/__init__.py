"""Attention, KV deviation and what blending restores, on one prompt or a dataset, as JSON and a self-contained page.

    PromptLayout -> `analyze_prompt` (forward passes, in tiles) -> PromptAnalysis -> `summarize` -> Numbers, averaged over
    prompts -> `analysis_document` (JSON value) -> `write_page` (HTML)

Names are imported on first use, so that importing the package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blend.analyze.document import Analyzed, RunFacts, analysis_document, write_json
    from blend.analyze.numbers import Numbers, mean_numbers, summarize
    from blend.analyze.page import page_text, write_page
    from blend.analyze.prompt_view import prompt_document
    from blend.analyze.study import PromptAnalysis, analyze_prompt

_HOMES = {
    "Analyzed": "document",
    "Numbers": "numbers",
    "PromptAnalysis": "study",
    "RunFacts": "document",
    "analysis_document": "document",
    "analyze_prompt": "study",
    "mean_numbers": "numbers",
    "page_text": "page",
    "prompt_document": "prompt_view",
    "summarize": "numbers",
    "write_json": "document",
    "write_page": "page",
}

__all__ = [
    "Analyzed",
    "Numbers",
    "PromptAnalysis",
    "RunFacts",
    "analysis_document",
    "analyze_prompt",
    "mean_numbers",
    "page_text",
    "prompt_document",
    "summarize",
    "write_json",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blend.analyze' has no attribute {name!r}")
    return getattr(import_module(f"blend.analyze.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
