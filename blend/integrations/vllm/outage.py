"""Whether the prefill process is asked, and what the log says of it: one that hangs costs one request its timeout, not all."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from blend.integrations.vllm.wire import WireError
from blend.serve.http.errors import ApiError

_LOG = logging.getLogger("vllm.kvblend")
_SLOW_S = 1.0  # whoever failed sooner may be asked again at once: that costs nothing
_PAUSE_S = 5.0


class LeftAloneError(WireError):
    """The prefill process was not asked, because it has just been too slow."""


class Outage:
    """For one event loop. After a failure that took its time the process is left alone; one request at a time looks again."""

    def __init__(self) -> None:
        self._told = self._slow = self._looking = False
        self._until = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around one question. Raises `LeftAloneError` at once while it is left alone."""
        if self._slow and (self._looking or time.monotonic() < self._until):
            raise LeftAloneError("it is left alone")
        looks = self._looking = self._slow
        begin = time.monotonic()
        try:
            yield
        except ApiError:
            self.over()
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) or time.monotonic() - begin > _SLOW_S:
                self._slow, self._until = True, time.monotonic() + _PAUSE_S
            raise
        else:
            self.over()
        finally:
            if looks:
                self._looking = False

    def tell(self, why: str) -> None:
        """One line an outage."""
        if not self._told:
            _LOG.warning("kvblend: %s; vLLM prefills by itself until it works again", why)
        self._told = True

    def over(self) -> None:
        """It has answered."""
        if self._told:
            _LOG.info("kvblend: prompts are blended again")
        self._told = self._slow = False
