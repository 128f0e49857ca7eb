"""The requests of sessions that run, so that what they would leave goes when their session is deleted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from blend.serve.request import Request


class RunningSessions:
    """Which requests belong to which session, while they exist. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A request's event lives as long as anything that the request could still leave.
        self._sessions: WeakKeyDictionary[threading.Event, tuple[str, str]] = WeakKeyDictionary()

    def add(self, request: Request) -> None:
        """Note a request that begins."""
        if request.session:
            with self._lock:
                self._sessions[request.session_ended] = request.tenant, request.users_session

    def end(self, tenant: str, users_session: str) -> None:
        """The requests of this session leave neither text nor rows from now on; a request that begins later may."""
        with self._lock:
            for ended, session in list(self._sessions.items()):
                if session == (tenant, users_session):
                    ended.set()
