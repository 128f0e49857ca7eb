"""Bytes in a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure; through obstore, names as keys.

Objects have no time of last use: a listing shows the time of the last `put`. A bucket therefore evicts nothing;
`blend store prune` does, and a disk tier in front. Decisions between processes are conditional puts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.backend import Backend, Blob, Buffer, Found, Range, Stored, require_lease

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore

AT_ONCE = 16
_HEAD = 64 << 10  # an exchange takes as long for so much as for less
_PAGE = 1000
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|\b507\b|No space left|StorageFull")


class ObjectBlob(Blob):
    """One version of an object: its later bytes are asked for by its tag, so that no other version's are taken for them."""

    def __init__(self, backend: ObjectBackend, name: str, about: ObjectMeta, head: bytes) -> None:
        self._backend, self._name, self._about = backend, name, about
        self.nbytes, self.head = about["size"], head

    def read(self, *ranges: Range) -> bool:
        """One exchange each, none for what came along."""
        return all(self._read(one.offset, one.into) for one in ranges)

    @property
    def version(self) -> UpdateVersion:
        """What tells it from others: a tag, and in some clouds a number."""
        version: UpdateVersion = {"e_tag": self._about["e_tag"]}
        if self._about["version"] is not None:
            version["version"] = self._about["version"]
        return version

    def _read(self, offset: int, into: memoryview) -> bool:
        end = offset + into.nbytes
        if end > self.nbytes:
            return False
        if end <= len(self.head):
            into[:] = self.head[offset:end]
        elif into.nbytes:
            into[:] = self._backend.get_range(self._name, offset, end, self._about["e_tag"])
        return True


class ObjectBackend(Backend):
    """Objects of `store` under its prefix.

    store: reads, lists, deletes and puts may be tried again by it. once: the same without another try, for conditional puts:
    one whose answer got lost would find itself in its way. place: for messages.
    """

    def __init__(self, store: ObjectStore, once: ObjectStore, place: str) -> None:
        self._store, self._once, self.place = store, once, place

    def open(self, name: str, head: int) -> ObjectBlob | None:
        """One exchange."""
        most = max(head, _HEAD)
        with self._exchange("read"):
            try:
                found = obstore.get(self._store, name, options={"range": (0, most)})
                about, beginning = found.meta, bytes(found.bytes())
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None
            except Exception as error:
                if "416" not in str(error):
                    raise
                about, beginning = obstore.head(self._store, name), b""  # nothing has no first byte
        self._require_whole(beginning, min(most, about["size"]))
        return ObjectBlob(self, name, about, beginning)

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """As many exchanges, `AT_ONCE` at the same time."""
        if len(names) < 2:
            return super().open_many(names, head)
        return list(self._threads.map(lambda name: self._open_or_damage(name, head), names))

    def get_range(self, name: str, begin: int, end: int, tag: str | None) -> bytes:
        """Bytes of the version with this tag. Raises `EntryDamagedError` where that is gone."""
        with self._exchange("read"):
            try:
                found = obstore.get(self._store, name, options={"range": (begin, end), "if_match": tag})
                content = bytes(found.bytes())
            except (FileNotFoundError, PreconditionError):
                raise EntryDamagedError("it was replaced or deleted while it was read") from None
        self._require_whole(content, end - begin)
        return content

    def _require_whole(self, content: bytes, nbytes: int) -> None:
        if len(content) != nbytes:
            raise StoreUnreachableError(f"{self.place} sent half of what it was asked for")

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """One exchange, several for a large object; acknowledged by the server when it returns."""
        require_lease(self, name)
        with self._exchange("written"):
            obstore.put(self._store, name, b"".join(blobs))

    def swap(self, name: str, content: bytes, was: bytes | None) -> bool:
        """What it holds is looked at, and replaced if nobody has replaced it since."""
        require_lease(self, name)
        if was is None:
            return self._put_once(name, content, "create")
        found = self.open(name, 0)
        if found is None or found.nbytes != len(was):
            return False
        held = bytearray(found.nbytes)
        try:
            found.read(Range(0, memoryview(held)))
        except EntryDamagedError:
            return False
        return held == was and self._put_once(name, content, found.version)

    def _put_once(self, name: str, content: bytes, mode: Literal["create"] | UpdateVersion) -> bool:
        with self._exchange("written"):
            try:
                obstore.put(self._once, name, content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def delete(self, name: str) -> bool:
        """Two exchanges: a bucket does not say whether there was anything."""
        require_lease(self, name)
        with self._exchange("written"):
            try:
                obstore.head(self._store, name)
            except FileNotFoundError as error:
                self._require_bucket(error)
                return False
            obstore.delete(self._store, name)
        return True

    def listing(self, prefix: str) -> Iterator[Stored]:
        """A thousand an exchange."""
        with self._exchange("read"):
            for page in obstore.list(self._store, prefix=prefix, chunk_size=_PAGE):
                yield from (Stored(one["path"], one["size"], one["last_modified"].timestamp()) for one in page)

    def folders(self, prefix: str) -> set[str]:
        """As the bucket groups them."""
        with self._exchange("read"):
            found = obstore.list_with_delimiter(self._store, prefix=prefix)
        return {one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"]}

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(AT_ONCE, "kvblend-objects")

    @contextmanager
    def _exchange(self, doing: str) -> Iterator[None]:
        """Whatever obstore raises as one line of ours."""
        try:
            yield
        except (StoreError, GeneratorExit):
            raise
        except Exception as error:
            raise self._failed(error, doing) from None

    def _failed(self, error: Exception, doing: str) -> StoreError:
        text = str(error)
        if isinstance(error, FileNotFoundError) or _lacks_bucket(text):
            return _without_bucket(self.place)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return StoreError(f"{self.place} refuses to be {doing}: see which credentials are in the environment")
        if _FULL.search(text):
            return StoreError(f"{self.place} is full: raise its quota or remove entries with `blend store prune`")
        return StoreUnreachableError(
            f"{self.place} cannot be {doing} ({_cause(text)}): see that it is up and reachable"
        )

    def _require_bucket(self, error: Any) -> None:
        """Nothing is missing in a bucket that is not there."""
        if _lacks_bucket(str(error)):
            raise _without_bucket(self.place) from None


def _lacks_bucket(text: str) -> bool:
    return "NoSuchBucket" in text or "ContainerNotFound" in text


def _without_bucket(place: str) -> StoreError:
    return StoreError(f"there is no bucket for {place}: create it or correct its name")


def _cause(text: str) -> str:
    """The last words of the first line, which say what happened; the others name the request."""
    first = text.partition("\n")[0]
    return first.rpartition(" - ")[2][:120] or "no answer"
