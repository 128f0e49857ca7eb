"""Fair shares: what each client, and each end user of a client, may keep in a cache while others want its room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ACTIVE_S = 3600.0  # behind the last request of a holder, in which its share is kept for it


class Holder(NamedTuple):
    """Whom the content of a cache counts for.

    Attributes:
        client: a tenant, the holder of a key, or an address; "" if it is unknown.
        user: the end user whom the client named; "" for all that it did not name.

    """

    client: str = ""
    user: str = ""


class Shares:
    """Divides room equally among the active clients, and the share of each client equally among its active end users.

    A share that its holder does not use is lent to others. Names of end users are the client's own words: whoever invents
    many of them takes room of that client only.

    Args:
        room: bytes to divide.
        sizes: bytes of each holder.
        active: the holders that have a share; others exceed theirs with their first byte.

    """

    def __init__(self, room: int, sizes: Mapping[Holder, int], active: Iterable[Holder]) -> None:
        self._sizes = Counter(sizes)
        self._of_clients = Counter[str]()
        for holder, nbytes in self._sizes.items():
            self._of_clients[holder.client] += nbytes
        self._active = frozenset(active)
        self._users = Counter(holder.client for holder in self._active)
        self._client_share = room / max(1, len(self._users))

    def exceeded_by(self, holder: Holder) -> bool:
        """Whether a client and its end user both have more than their shares: then their content makes room."""
        if holder not in self._active:
            return True
        user_share = self._client_share / self._users[holder.client]
        return self._of_clients[holder.client] > self._client_share and self._sizes[holder] > user_share

    def remove(self, holder: Holder, nbytes: int) -> None:
        """Some content of a holder has made room."""
        self._sizes[holder] -= nbytes
        self._of_clients[holder.client] -= nbytes
