"""How much of a model's weights is downloaded and loaded: counted where the libraries would draw their bars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from blend.stopwatch import Progress

_BAR = "Loading weights"  # as transformers calls it


class LoadingProgress:
    """Reports the stage "load" from the begin to the end of the block, also after an error, in tensors of the weights.

    If they are downloaded first, the stage "download" comes in between, in bytes.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = 0  # unknown
        self._download_bytes = 0  # of the weights that are being downloaded

    def __enter__(self) -> LoadingProgress:
        self._progress("load", 0, 0)
        return self

    def __exit__(self, *error: object) -> None:
        self._end_download()
        total = max(1, self._total)
        self._progress("load", total, total)

    def bar_of_downloads(self) -> type[Any]:
        """A kind of bar for `from_pretrained(tqdm_class=...)`, which draws nothing and reports the bytes of weights."""
        from tqdm.auto import tqdm

        report = self._report_download
        open_bars = dict[int, tuple[int, int]]()  # the bytes that are here, and all, of each

        class DownloadBar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread that refreshes it

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **{**options, "file": StringIO(), "disable": False})

            def display(self, *arguments: Any, **options: Any) -> None:
                """Called ten times a second at most, and when the bar begins and ends."""
                if self.unit != "B" or not self.total:  # a bar of files
                    return
                open_bars[id(self)] = round(self.n), round(self.total)
                # Several bars show the same files: their bytes on the line, and on the disk.
                done = max(here for here, _ in open_bars.values())
                report(done, max(total for _, total in open_bars.values()))

            def close(self) -> None:
                super().close()
                open_bars.pop(id(self), None)

        return DownloadBar

    def _report_download(self, done: int, total: int) -> None:
        """The total grows with each file that begins, so it is all only when tensors are loaded."""
        self._download_bytes = max(total, self._download_bytes)
        self._progress("download", min(done, self._download_bytes - 1), self._download_bytes)

    def _end_download(self) -> None:
        if self._download_bytes:
            self._progress("download", self._download_bytes, self._download_bytes)
            self._download_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors that the block loads. In one thread at a time: transformers' hook is of the process."""
        from transformers.utils import logging

        def hook(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            is_counted = options.get("desc") == _BAR and len(arguments) == 1 and isinstance(arguments[0], Collection)
            return self._counted(arguments[0]) if is_counted else factory(*arguments, **options)

        before = logging.set_tqdm_hook(hook)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)

    def _counted(self, tensors: Collection[Any]) -> Iterator[Any]:
        self._end_download()
        self._total = len(tensors)
        for number, tensor in enumerate(tensors):
            self._progress("load", number, self._total)
            yield tensor
