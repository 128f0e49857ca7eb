"""How long a server is waited for, and how long it is left alone when it does not answer."""

from __future__ import annotations

from typing import NamedTuple


class Patience(NamedTuple):
    """Seconds: for a connection, for one answer, and until a server that did not answer is asked again."""

    connect_s: float = 2.0
    answer_s: float = 10.0
    pause_s: float = 15.0
