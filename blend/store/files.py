"""The files of a disk store: written whole or not at all, for their owner alone.

    store.json                    {"kind": "kvblend store", "format": 1, "id": ...}, written first
    objects/, artifacts/, ...     see `backend`
    tmp/, .writing                unfinished files; the lock of writers

An error that lies in one file (it is no file, the disk cannot read it) is damage: `EntryDamagedError`. Every other error (no
permission, too many open files, a file system that is gone) is an outage: `StoreError`. Taking it for a miss would compute the
whole store again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError, StoreNotWritableError, StoreUnreachableError
from blend.files import make_private_folder, set_aside, sweep, write_atomically, write_once
from blend.store.backend import Backend
from blend.store.lease import WAIT_S
from blend.store.seal import as_json

MANIFEST = "store.json"
_FOLDERS = ("objects", "tmp")  # of every store that holds anything
_LOG = logging.getLogger("kvblend.store")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def _numbers(names: str) -> frozenset[int]:
    """Those that this system has."""
    return frozenset(getattr(errno, name) for name in names.split() if hasattr(errno, name))


# Of a network file system that does not answer, or whose mount is gone.
_AWAY = _numbers(
    "EIO ESTALE ETIMEDOUT EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ENOTCONN ECONNREFUSED ECONNRESET ECONNABORTED "
    "ENODEV ENXIO ESHUTDOWN EREMOTEIO"
)
# A network file system says "stale" of an open file that another machine has evicted.
_ONE_FILE = _numbers("EIO ESTALE EBADMSG EUCLEAN ELOOP EISDIR ENXIO ENODEV")
_MISSING = (FileNotFoundError, NotADirectoryError)

STORE_FORMAT = 1
_LARGEST_MANIFEST = 1 << 16  # bytes
_KIND = "kvblend store"
_SEEN = "seen"  # holds the id of the store that was seen
_SEEN_WITHOUT_ID = b"seen"  # what versions wrote that knew no ids


class StoreFiles:
    """Files and folders below `root`, closed to other users whatever the process's umask.

    Where the setgid bit is set on `root`, its group has the same rights on everything written from then on. A root that was
    never seen holds nothing, and becomes a store with the first write. One that was seen must be there.

    Args:
        root: where the store is.
        local: this machine's disk tier, which remembers that the store was seen; without one this process does.

    """

    def __init__(self, root: Path, local: Backend | None = None) -> None:
        self.root = root
        self.tmp = root / "tmp"
        self._local = local
        self._is_seen = False

    def require_present(self) -> None:
        """Raise `StoreUnreachableError` when the store was removed or unmounted: nothing that it lacks is a miss then.

        A lost or damaged manifest among a store's files is replaced; a damaged one is set aside.
        """
        try:
            try:
                current = store_id(self.root)
            except (*_MISSING, ManifestDamagedError, IsADirectoryError):
                if not self._has_new_manifest():
                    raise
                current = store_id(self.root)
            self._note_seen(current)
        except _MISSING:
            self._require_never_seen()
        except OSError as error:
            raise unusable(self.root, error, "read") from None

    def _has_new_manifest(self) -> bool:
        """Whether a manifest was made in place of a lost or damaged one; False where the other files are no store's.

        Its id is new, which no other machine knows: a folder that is mounted is left alone, see `MountedFiles`.
        """
        manifest = self.root / MANIFEST
        if not all((self.root / name).is_dir() for name in _FOLDERS):
            return False
        aside = set_aside(manifest) if os.path.lexists(manifest) else None
        self._write_manifest()
        where = f", the damaged one is {aside.name}" if aside is not None else ""
        _LOG.warning("store_manifest_replaced", extra={"why": f"{manifest} was lost or damaged{where}"})
        return True

    def _require_never_seen(self) -> None:
        if self._is_seen or (self._local is not None and self._local.read(_SEEN) is not None):
            raise StoreUnreachableError(
                f"the store {self.root} is gone (there is no {MANIFEST} in it): mount its file system again{self._anew}"
            )

    @property
    def _anew(self) -> str:
        return "" if self._local is None else f"; to start anew, delete {self._local.place}"

    def _note_seen(self, current: str) -> None:
        name = current.encode()
        if not self._is_seen and self._local is not None and self._local.read(_SEEN) != name:
            with suppress(StoreError):  # a full disk: the next process tries again
                self._local.put(_SEEN, [name])
        self._is_seen = True

    def require_writable(self) -> None:
        """Have it made if it never was. Raises `StoreError` when it is gone, or something else."""
        self.require_present()
        if self._is_seen:
            return
        try:
            self._make_root()
            self.require_present()
        except OSError as error:
            raise unusable(self.root, error) from None

    def _make_root(self) -> None:
        make_private_folder(self.root)
        names = [path.name for path in self.root.iterdir()]
        manifest = self.root / MANIFEST
        if MANIFEST in names or manifest.exists():  # another process may have made it since the first look
            return
        is_unfinished = re.compile(r"\..*\.tmp").fullmatch
        foreign = sorted(name for name in names if name != "lost+found" and not is_unfinished(name))
        if foreign:
            raise StoreError(
                f"{self.root} is not a store and not empty (it holds {foreign[0]!r}): choose an empty or new directory"
            )
        self._write_manifest()

    def _write_manifest(self) -> None:
        fields = {"kind": _KIND, "format": STORE_FORMAT, "id": uuid.uuid4().hex}
        write_once(self.root / MANIFEST, as_json(fields), self.file_mode())

    def tidy(self) -> None:
        """Close the store to other users and remove what killed writers left, where this user has the right to."""
        with suppress(StoreUnreachableError):
            self.require_present()
        if self._is_seen:
            _close_to_others(self.root)
            sweep(self.root)
            sweep(self.tmp)

    def open(self, path: Path) -> int | None:
        """Descriptor of what is there, which the caller closes; None for nothing. Never waits, as opening a pipe would."""
        if not self._is_seen:
            self.require_present()
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except _MISSING:
            self.require_present()
            return None
        except OSError as error:
            raise self.failed("read", error) from None

    def write(self, path: Path, blobs: Iterable[bytes | memoryview]) -> None:
        """Replace the file at `path`. A folder there is set aside."""
        self.require_writable()
        try:
            self._make_folder(path.parent)
            self._make_folder(self.tmp)
            blobs = tuple(blobs)
            try:
                write_atomically(path, blobs, self.tmp, self.file_mode())
            except IsADirectoryError:  # may hold something of value
                set_aside(path)
                write_atomically(path, blobs, self.tmp, self.file_mode())
        except OSError as error:
            raise self.failed("written", error) from None

    def remove(self, path: Path) -> bool:
        """Remove the file at `path`; whether there was one. A folder is set aside instead."""
        try:
            if path.is_dir() and not path.is_symlink():
                set_aside(path)
            else:
                path.unlink()
        except _MISSING:
            self.require_present()
            return False
        except OSError as error:
            raise self.failed("written", error) from None
        return True

    def scan(self, path: Path | str) -> list[os.DirEntry[str]]:
        """What is in a folder; nothing when there is none."""
        try:
            with os.scandir(path) as entries:
                return list(entries)
        except _MISSING:
            self.require_present()
            return []
        except OSError as error:
            raise self.failed("read", error) from None

    def folders(self, path: Path | str) -> Iterator[str]:
        """The names of the folders in a folder."""
        for entry in self.scan(path):
            try:
                if entry.is_dir():
                    yield entry.name
            except OSError as error:
                if error.errno not in _ONE_FILE:
                    raise self.failed("read", error) from None

    def file_mode(self) -> int:
        """Permissions of files that are written now."""
        return self._folder_mode() & 0o660

    def failed(self, doing: str, error: OSError) -> StoreError:
        """The error to raise for one of the operating system: damage of one file that was "read", or an outage."""
        if doing == "read" and error.errno in _ONE_FILE:
            self.require_present()
            return EntryDamagedError(f"it cannot be read ({error.strerror})")
        return unusable(self.root, error, doing)

    def _folder_mode(self) -> int:
        mode = self.root.stat().st_mode
        return 0o700 | (mode & (0o070 | stat.S_ISGID) if mode & stat.S_ISGID else 0)

    def _make_folder(self, path: Path) -> None:
        if path == self.root or path.is_dir():
            return
        self._make_folder(path.parent)
        path.mkdir(0o700, exist_ok=True)
        with suppress(OSError):  # a file system without permissions
            path.chmod(self._folder_mode())


def unusable(root: Path, error: OSError, doing: str = "written") -> StoreError:
    """The one-line error for a store that cannot be read or written, with the remedy."""
    if error.errno in _FULL:
        remedy = "free disk space or set a smaller budget"
    elif error.errno in _TOO_MANY:
        remedy = "close readers or raise `ulimit -n`"
    elif error.errno in _IN_THE_WAY:
        remedy = "something else is in the way; choose another directory"
    elif doing == "read":
        remedy = "see that it is mounted and that this user may read it"
    else:
        remedy = "make the directory writable or choose another directory; see that its disk is mounted"
    kind = StoreUnreachableError if error.errno in _AWAY else StoreError
    if error.errno in (*_FULL, errno.EROFS):
        kind = StoreNotWritableError
    return kind(f"the store {root} cannot be {doing} ({error.strerror or error}): {remedy}")


def _close_to_others(root: Path) -> None:
    # The root alone keeps others out. A folder that the rest of the world may not enter was made so on purpose.
    with suppress(OSError):
        info = root.stat()
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid == os.geteuid() and mode & 0o007:
            root.chmod(mode & ~(0o007 if mode & stat.S_ISGID else 0o077))


def store_id(root: Path) -> str:
    """What tells the store at `root` from others; "" of a store that was made without an id.

    Raises `ManifestDamagedError` where the root is of another kind, `StoreError` where it is of another format, and OSError
    where it cannot be read.
    """
    try:
        manifest = dict(json.loads(_read_small(root / MANIFEST)))
    except (ValueError, TypeError, RecursionError):
        manifest = {}
    version = manifest.get("format")
    if manifest.get("kind") != _KIND or type(version) is not int:
        raise ManifestDamagedError(
            f"{root / MANIFEST} is damaged or not of kvblend: restore this file from a backup, or choose another directory"
        )
    if version != STORE_FORMAT:
        raise StoreError(
            f"the store {root} has format {version}, this kvblend reads {STORE_FORMAT}: "
            "upgrade kvblend or choose another store"
        )
    return str(manifest.get("id", ""))


def _read_small(path: Path) -> bytes:
    """A small file; empty where a pipe, a device or a large file is in its place. Raises OSError."""
    info = path.stat()
    is_small = stat.S_ISREG(info.st_mode) and info.st_size <= _LARGEST_MANIFEST
    return path.read_bytes() if is_small else b""


class ManifestDamagedError(StoreError):
    """The manifest is damaged, or of something else."""


class AnotherStoreError(StoreUnreachableError):
    """Another store lies at the place of the one that was there before."""


class _ReadId(NamedTuple):
    """The id in a manifest. stamp: tells that file from others that took its place."""

    stamp: tuple[int, ...]
    id: str


class MountedFiles(StoreFiles):
    """The files of a store in a directory that is mounted: at its place may be nothing now, or another store.

    Args:
        root: where the store is.
        local: this machine's disk tier, which remembers the store's id; without one this process does.
        above: the mounted store that this one lies in. It must be there before this one is made.

    """

    def __init__(self, root: Path, local: Backend | None = None, above: MountedFiles | None = None) -> None:
        super().__init__(root, local)
        self._above = above
        self._expected: str | None = None
        self._last_read: _ReadId | None = None

    def require_present(self) -> None:
        """Raise `StoreUnreachableError` when the store is gone, or another one lies at its place."""
        current = self._current_id()
        if current is None:
            self._require_never_seen()
            return
        if self._expected is None:
            self._expected = self._remembered()
        if self._expected is None:
            self._note_seen(current)
            self._expected = current
        if current != self._expected:
            raise AnotherStoreError(
                f"at {self.root} lies another store than before: mount the right file system again{self._anew}"
            )
        self._is_seen = True

    def require_writable(self) -> None:
        """Have it made if it never was, but only in the store above that was there before."""
        if self._above is not None and not self._is_seen:
            self._above.require_writable()
        super().require_writable()

    def open(self, path: Path) -> int | None:
        """Open a file of the store that was seen here, and of no other."""
        self.require_present()
        return super().open(path)

    def remove(self, path: Path) -> bool:
        """Remove a file of the store that was seen here, and of no other."""
        self.require_present()
        return super().remove(path)

    def scan(self, path: Path | str) -> list[os.DirEntry[str]]:
        """List a folder of the store that was seen here, and of no other."""
        self.require_present()
        return super().scan(path)

    def failed(self, doing: str, error: OSError) -> StoreError:
        """A file that cannot be read is damage only where the store itself can be, which is asked of its server anew."""
        self._last_read = None
        return super().failed(doing, error)

    def _current_id(self) -> str | None:
        """The id of the store that is there now, None without one; read again when its manifest is another file."""
        try:
            info = (self.root / MANIFEST).stat()
            stamp = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
            last_read = self._last_read
            if last_read is None or last_read.stamp != stamp:
                last_read = _ReadId(stamp, store_id(self.root))
                self._last_read = last_read
            return last_read.id
        except _MISSING:
            return None
        except OSError as error:
            raise unusable(self.root, error, "read") from None

    def _remembered(self) -> str | None:
        """The id that this machine's disk tier remembers; None if it knows of no id."""
        content = None if self._local is None else self._local.read(_SEEN)
        return None if content in (None, _SEEN_WITHOUT_ID) else content.decode(errors="replace")


@contextmanager
def locked(files: StoreFiles, name: str = ".writing") -> Iterator[None]:
    """Held by one thread of one process at a time; it ends with the process. Raises `StoreError` after ten minutes."""
    from filelock import FileLock, Timeout

    files.require_writable()
    path = files.root / name
    try:
        lock = FileLock(path, timeout=WAIT_S, mode=files.file_mode())
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"another process has been writing to {files.root} for {WAIT_S:g} s; wait for it and try again"
        ) from None
    except OSError as error:
        raise files.failed("written", error) from None
    try:
        yield
    finally:
        lock.release()
