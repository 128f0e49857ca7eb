"""Bytes in a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure; through obstore, names as keys.

Objects have no time of last use: a listing shows the time of the last `put`. A bucket therefore evicts nothing;
`blend store prune` does, and a disk tier in front. Decisions between processes are conditional puts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.backend import Blob, Buffer, Found, Stored, is_of_kvblend
from blend.store.lease import ServerBackend

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore

AT_ONCE = 16
_HEAD = 64 << 10  # an exchange takes as long for so much as for less
_PIECE = 8 << 20  # a slow connection brings so much within the client's timeout
_PAGE = 1000
T = TypeVar("T")
R = TypeVar("R")
_NO_SUCH_RANGE = re.compile(r"\b416\b")
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|\b507\b|No space left|StorageFull")


class ObjectBlob(Blob):
    """One version of an object: its later bytes are asked for by its tag, so that no other version's are taken for them.

    Args:
        backend: reads the later bytes.
        name: the name of the object.
        about: its size and its tag.
        head: its first bytes.

    """

    def __init__(self, backend: ObjectBackend, name: str, about: ObjectMeta, head: bytes) -> None:
        self._backend = backend
        self._name = name
        self._about = about
        self.nbytes = about["size"]
        self.head = head

    def _fetch(self, offset: int, into: memoryview) -> None:
        """In exchanges of some megabytes each, at the same time."""

        def fetch(begin: int) -> None:
            end = min(begin + _PIECE, into.nbytes)
            options: GetOptions = {"range": (offset + begin, offset + end), "if_match": self._about["e_tag"]}
            with self._backend.exchange("read"):
                try:
                    piece = bytes(obstore.get(self._backend.store, self._name, options=options).bytes())
                except (FileNotFoundError, PreconditionError):
                    raise EntryDamagedError("it was replaced or deleted while it was read") from None
            if len(piece) != end - begin:
                raise EntryDamagedError("its server sent another number of bytes")
            into[begin:end] = piece

        self._backend.run(fetch, range(0, into.nbytes, _PIECE))

    @property
    def version(self) -> UpdateVersion:
        """What tells it from others: a tag, and in some clouds a number."""
        version: UpdateVersion = {"e_tag": self._about["e_tag"]}
        if self._about["version"] is not None:
            version["version"] = self._about["version"]
        return version


class ObjectBackend(ServerBackend):
    """Objects of `store` under its prefix.

    Args:
        store: reads, lists, deletes and puts; it may try again.
        once: the same without another try, for conditional puts: one whose answer got lost would find itself in its way.
        place: for messages.

    """

    def __init__(self, store: ObjectStore, once: ObjectStore, place: str) -> None:
        self.store = store
        self._once = once
        self.place = place

    def open_many(self, names: Sequence[str]) -> list[Found]:
        """Open each name in an exchange, `AT_ONCE` at the same time."""
        return self.run(self._opened, names)

    def _opened(self, name: str) -> ObjectBlob | None:
        with self.exchange("read"):
            try:
                answer = obstore.get(self.store, name, options={"range": (0, _HEAD)})
                about = answer.meta
                beginning = bytes(answer.bytes())
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise
                return None
            except GenericError as error:
                if not _NO_SUCH_RANGE.search(str(error)):
                    raise
                about = obstore.head(self.store, name)
                if about["size"]:
                    raise
                beginning = b""  # an empty object has no range
        return ObjectBlob(self, name, about, beginning)

    def run(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`call` each item, `AT_ONCE` at the same time. Raises what a call raises."""
        if len(items) < 2:
            return [call(item) for item in items]
        return list(self._threads.map(call, items))

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Put in one exchange, a large object in several; acknowledged by the server when it returns."""
        self.require_lease()
        with self.exchange("written"):
            obstore.put(self.store, name, b"".join(blobs))

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """Look at what the name holds, then write on condition that it still holds that."""
        self.require_lease()
        if was is None:
            return self._put_once(name, content, "create")
        blob = self._opened(name)
        if blob is None or blob.nbytes != len(was):
            return False
        current = bytearray(blob.nbytes)
        try:
            blob.read(0, memoryview(current))
        except EntryDamagedError:
            return False
        return current == was and self._put_once(name, content, blob.version)

    def _put_once(self, name: str, content: bytes, mode: Literal["create"] | UpdateVersion) -> bool:
        with self.exchange("written"):
            try:
                obstore.put(self._once, name, content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def delete(self, name: str) -> None:
        """Delete in one exchange."""
        self.require_lease()
        with self.exchange("written"):
            try:
                obstore.delete(self.store, name)
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise

    def listing(self, prefix: str) -> Iterator[Stored]:
        """List a thousand objects an exchange."""
        with self.exchange("read"):
            for page in obstore.list(self.store, prefix=prefix, chunk_size=_PAGE):
                for about in filter(_is_ours, page):
                    yield Stored(about["path"], about["size"], used=about["last_modified"].timestamp())

    def folders(self, prefix: str) -> set[str]:
        """The folders, as the bucket groups its objects."""
        with self.exchange("read"):
            prefixes = obstore.list_with_delimiter(self.store, prefix=prefix)["common_prefixes"]
        return {folder.rstrip("/").rpartition("/")[2] for folder in prefixes}

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(AT_ONCE, "kvblend-objects")

    def _failed(self, error: Exception, doing: str) -> StoreError:
        text = str(error)
        if isinstance(error, FileNotFoundError) or _lacks_bucket(error):
            return StoreError(f"there is no bucket for {self.place}: create it or correct its name")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return StoreError(f"{self.place} refuses to be {doing}: see which credentials are in the environment")
        if _FULL.search(text):
            return StoreError(f"{self.place} is full: raise its quota or remove entries with `blend store prune`")
        return StoreUnreachableError(
            f"{self.place} cannot be {doing} ({_cause(text)}): see that it is up and reachable"
        )


def _is_ours(about: ObjectMeta) -> bool:
    return is_of_kvblend(about["path"])


def _lacks_bucket(error: Exception) -> bool:
    text = str(error)
    return "NoSuchBucket" in text or "ContainerNotFound" in text


def _cause(text: str) -> str:
    """The last words of the first line, which say what happened; the others name the request."""
    first = text.partition("\n")[0]
    return first.rpartition(" - ")[2][:120] or "no answer"
