"""How much of a model's weights is loaded: counted where transformers would draw its bar."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from blend.stopwatch import Progress

_BAR = "Loading weights"  # as transformers calls it


class LoadingProgress:
    """Reports the stage "load" from the begin to the end of the block, also after an error, in tensors of the weights."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = 0  # unknown

    def __enter__(self) -> LoadingProgress:
        self._progress("load", 0, 0)
        return self

    def __exit__(self, *error: object) -> None:
        total = max(1, self._total)
        self._progress("load", total, total)

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
        self._total = len(tensors)
        for number, tensor in enumerate(tensors):
            self._progress("load", number, self._total)
            yield tensor
