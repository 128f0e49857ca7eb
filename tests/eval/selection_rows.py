"""Rows of results as the tests want them."""

from dataclasses import replace
from typing import Any

from study.rows import Row

_USUAL = Row(
    model="m",
    set="s",
    task="qa",
    id="1",
    method="query",
    top1=0.5,
    f1=0.5,
    rouge_l=0.25,
    f1_full=0.75,
    ttft_s=2.0,
    full_ttft_s=8.0,
    select_s=0.4,
    rows=100,
    share=0.25,
)


def row(method: str, id_: str, kl: float | None, **more: Any) -> Row:
    """A row of the set s unless told otherwise."""
    return replace(_USUAL, method=method, id=id_, kl=kl, **more)
