"""Bytes in a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure; through obstore, names as keys.

Objects have no time of last use: a listing shows the time of the last `put`. A bucket therefore evicts nothing;
`blend store prune` does, and a disk tier in front. Decisions between processes are conditional puts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store.backend import Backend, Blob, Buffer, Found, Range, Stored
from blend.store.lease import leased, require_lease

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore

AT_ONCE = 16
_HEAD = 64 << 10  # an exchange takes as long for so much as for less
_PIECE = 8 << 20  # a slow connection brings so much within the client's timeout
_PAGE = 1000
T = TypeVar("T")
R = TypeVar("R")
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|\b507\b|No space left|StorageFull")


class ObjectBlob(Blob):
    """One version of an object: its later bytes are asked for by its tag, so that no other version's are taken for them.

    Args:
        backend: reads the later bytes.
        name: the name of the object.
        about: its size and its tag.
        head: its first bytes.

    """

    def __init__(
        self,
        backend: ObjectBackend,
        name: str,
        about: ObjectMeta,
        head: bytes,
    ) -> None:
        self._backend = backend
        self._name = name
        self._about = about
        self.nbytes = about["size"]
        self.head = head

    def read(self, *ranges: Range) -> bool:
        """Read in exchanges of some megabytes each, at the same time; in none what came along."""
        if any(part.end > self.nbytes for part in ranges):
            return False
        self._backend.run(self._read, [piece for part in ranges for piece in part.pieces(_PIECE)])
        return True

    @property
    def version(self) -> UpdateVersion:
        """What tells it from others: a tag, and in some clouds a number."""
        version: UpdateVersion = {"e_tag": self._about["e_tag"]}
        if self._about["version"] is not None:
            version["version"] = self._about["version"]
        return version

    def _read(self, piece: Range) -> None:
        if piece.end <= len(self.head):
            piece.into[:] = self.head[piece.offset : piece.end]
        else:
            self._backend.fill(self._name, piece, self._about["e_tag"])


class ObjectBackend(Backend):
    """Objects of `store` under its prefix.

    Args:
        store: reads, lists, deletes and puts; it may try again.
        once: the same without another try, for conditional puts: one whose answer got lost would find itself in its way.
        place: for messages.

    """

    def __init__(
        self,
        store: ObjectStore,
        once: ObjectStore,
        place: str,
    ) -> None:
        self._store = store
        self._once = once
        self.place = place

    def open(self, name: str, head: int) -> ObjectBlob | None:
        """Read the first bytes, in one exchange."""
        most = max(head, _HEAD)
        with self._exchange("read"):
            try:
                answer = obstore.get(self._store, name, options={"range": (0, most)})
                about = answer.meta
                beginning = bytes(answer.bytes())
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None
            except Exception as error:
                if "416" not in str(error):
                    raise
                about = obstore.head(self._store, name)
                beginning = b""  # nothing has no first byte
        self._require_whole(beginning, min(most, about["size"]))
        return ObjectBlob(self, name, about, beginning)

    def open_many(self, names: Sequence[str], head: int) -> list[Found]:
        """Open each name in an exchange, `AT_ONCE` at the same time."""
        return self.run(lambda name: self._open_or_damage(name, head), names)

    def run(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`call` each item, `AT_ONCE` at the same time. Raises what a call raises."""
        if len(items) < 2:
            return [call(item) for item in items]
        return list(self._threads.map(call, items))

    def fill(
        self,
        name: str,
        piece: Range,
        tag: str | None,
    ) -> None:
        """Read bytes of the version with this tag. Raises `EntryDamagedError` where that is gone."""
        options: GetOptions = {"range": (piece.offset, piece.end), "if_match": tag}
        with self._exchange("read"):
            try:
                content = bytes(obstore.get(self._store, name, options=options).bytes())
            except (FileNotFoundError, PreconditionError):
                raise EntryDamagedError("it was replaced or deleted while it was read") from None
        self._require_whole(content, piece.into.nbytes)
        piece.into[:] = content

    def _require_whole(self, content: bytes, nbytes: int) -> None:
        if len(content) != nbytes:
            raise StoreUnreachableError(f"{self.place} sent half of what it was asked for")

    def put(self, name: str, blobs: Sequence[Buffer]) -> None:
        """Put in one exchange, a large object in several; acknowledged by the server when it returns."""
        require_lease(self, name)
        with self._exchange("written"):
            obstore.put(self._store, name, b"".join(blobs))

    def swap(
        self,
        name: str,
        content: bytes,
        was: bytes | None,
    ) -> bool:
        """Look at what the name holds, then write on condition that it still holds that."""
        require_lease(self, name)
        if was is None:
            return self._put_once(name, content, "create")
        blob = self.open(name, 0)
        if blob is None or blob.nbytes != len(was):
            return False
        current = bytearray(blob.nbytes)
        try:
            blob.read(Range(0, memoryview(current)))
        except EntryDamagedError:
            return False
        return current == was and self._put_once(name, content, blob.version)

    def _put_once(
        self,
        name: str,
        content: bytes,
        mode: Literal["create"] | UpdateVersion,
    ) -> bool:
        with self._exchange("written"):
            try:
                obstore.put(self._once, name, content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def delete(self, name: str) -> bool:
        """Delete in two exchanges: a bucket does not say whether there was anything."""
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
        """List a thousand objects an exchange."""
        with self._exchange("read"):
            for page in obstore.list(self._store, prefix=prefix, chunk_size=_PAGE):
                for about in page:
                    yield Stored(about["path"], about["size"], used=about["last_modified"].timestamp())

    def folders(self, prefix: str) -> set[str]:
        """The folders, as the bucket groups its objects."""
        with self._exchange("read"):
            prefixes = obstore.list_with_delimiter(self._store, prefix=prefix)["common_prefixes"]
        return {folder.rstrip("/").rpartition("/")[2] for folder in prefixes}

    def writing(self) -> AbstractContextManager[None]:
        """The lease of this store."""
        return leased(self)

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
