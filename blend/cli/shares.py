"""`blend precompute` by many: the options, and what one share says when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from blend.cli.options import TEXT, number
from blend.errors import ConfigError
from blend.shards import Share

if TYPE_CHECKING:
    from collections.abc import Callable

    from blend.corpus import Precomputed
    from blend.rag import Rag
    from blend.shards import ShareDone
    from blend.timing import Progress
    from blend_retrieval import LoadedDocuments

F = TypeVar("F", bound="Callable[..., Any]")


class _Share(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """One share of how many, such as 2/4."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Share:
        """Parsed."""
        try:
            return value if isinstance(value, Share) else Share.parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class By(NamedTuple):
    """Who computes: this process all of it, or one share, or a Ray cluster. ray: its address; None for no cluster."""

    share: Share | None = None
    ray: str | None = None
    workers: int | None = None
    device: str = "auto"

    @classmethod
    def of(cls, given: dict[str, Any]) -> By:
        """From parsed options. Raises `ConfigError` for options that have nothing to say to each other."""
        by = cls(given["share"], given["ray"], given["ray_workers"], given["device"])
        ways = [name for name, value in (("--shard", by.share), ("--ray", by.ray)) if value is not None]
        if given["quick"] and ways:
            raise ConfigError(f"--quick is for one process, {ways[0]} for many: leave one of them out")
        if len(ways) > 1:
            raise ConfigError("--shard and --ray are two ways of sharing the work: leave one of them out")
        if by.workers and by.ray is None:
            raise ConfigError("--ray-workers says how many workers --ray has: give both")
        return by

    @property
    def words(self) -> str:
        """What progress is the progress of, where that is not all."""
        return f", shard {self.share}" if self.share else "" if self.ray is None else ", on Ray"

    def precompute(
        self, rag: Rag, documents: LoadedDocuments, *, add: bool, quick: bool, progress: Progress
    ) -> tuple[Precomputed, ShareDone | None]:
        """What was done, and how far the others are, where there are others."""
        if self.share is None and self.ray is None:
            return rag.precompute(documents, add=add, quick=quick, progress=progress), None
        from blend.shards import precompute_share

        if self.ray is None:
            assert self.share
            found = precompute_share(rag, documents, self.share, add=add, progress=progress)
            return found.done, found
        from blend.cli.console import note
        from blend.shards import cluster, compute_on

        with cluster(self.ray, self.workers, on_gpu=self.device != "cpu") as where:
            compute = compute_on(rag, where, note)
            return precompute_share(rag, documents, Share(1, 1), add=add, compute=compute, progress=progress).done, None


def by_many(function: F) -> F:
    """--shard, --ray, --ray-workers."""
    function = number(
        "--ray-workers",
        "ray_workers",
        "Workers on the Ray cluster.  [default: one for every GPU, or for every machine where there are none]",
    )(function)
    function = click.option(
        "--ray",
        type=TEXT,
        is_flag=False,
        flag_value="",
        default=None,
        metavar="[ADDRESS]",
        help="Compute the caches on the Ray cluster at ADDRESS (put =ADDRESS or --ray last), or on one that is started here.",
    )(function)
    return click.option(
        "--shard",
        "share",
        type=_Share(),
        default=None,
        help="Compute one share of the caches, such as 2/4; processes anywhere compute the others over the same store, "
        "with the same documents and options, in any order.",
    )(function)


def shared_document(found: ShareDone | None) -> dict[str, object]:
    """What `--json` prints besides: the share, which ones are not done, and whether this one finished the corpus."""
    if found is None:
        return {}
    return {"shard": str(found.share), "shards_to_come": list(found.lacks), "finished": found.last}


def shared_words(found: ShareDone) -> str:
    """How far the whole is, in a sentence."""
    if found.last:
        return "All shards are done: the corpus is complete."
    if not found.under_way:
        return "Another process finished this corpus, or began to make it hold other documents."
    if not found.lacks:
        return "All shards are done; the process that was told so first finishes the corpus."
    missing = ", ".join(f"{number}/{found.share.of}" for number in found.lacks)
    return f"Still to be done: {missing}; whoever is last measures the KV correction."
