"""The files of a disk store: written whole or not at all, for their owner alone.

    store.json                    {"kind": "kvblend store", "format": 1}, written first; in a mounted directory with an id
    objects/, artifacts/, ...     see `backend`
    tmp/, .writing                unfinished files; the lock of writers

An error that lies in one file (it is no file, the disk cannot read it) is damage: `EntryDamagedError`. Every other error (no
permission, too many open files, a file system that is gone) is an outage: `StoreError`. Taking it for a miss would compute the
whole store again.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from blend.errors import EntryDamagedError, StoreError, StoreNotWritableError, StoreUnreachableError
from blend.files import make_private_folder, set_aside, sweep, write_atomically, write_once
from blend.store.backend import Backend
from blend.store.lease import WAIT_S
from blend.store.seal import as_json

MANIFEST = "store.json"
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
_ONE_FILE = _numbers("EIO EBADMSG EUCLEAN ELOOP EISDIR ENXIO ENODEV")
_MISSING = (FileNotFoundError, NotADirectoryError)

STORE_FORMAT = 1
_KIND = "kvblend store"
_NOT_OURS_BUT_HARMLESS = ("lost+found",)
_MOST_BYTES = 1 << 16
_SEEN = "seen"


class StoreFiles:
    """Files and folders below `root`, closed to other users whatever the process's umask.

    Where the setgid bit is set on `root`, its group has the same rights on everything written from then on.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tmp = root / "tmp"

    def require_present(self) -> None:
        """Raise `StoreUnreachableError` when the store was removed or unmounted: nothing that it lacks is a miss then."""
        try:
            (self.root / MANIFEST).stat()
        except _MISSING:
            raise StoreUnreachableError(
                f"the store {self.root} is gone (there is no {MANIFEST} in it): mount it again or start anew"
            ) from None
        except OSError as error:
            raise unusable(self.root, error, "read") from None

    def require_writable(self) -> None:
        """Before anything is written: as `require_present`."""
        self.require_present()

    def open(self, path: Path) -> int | None:
        """Descriptor of a file, which the caller closes; None when there is none. Never waits, as opening a pipe would.

        Raises `EntryDamagedError` for what is there and no file.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except _MISSING:
            self.require_present()
            return None
        except OSError as error:
            raise self.failed("read", error) from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise EntryDamagedError("it is not a file")
        except EntryDamagedError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise self.failed("read", error) from None
        return descriptor

    def write(
        self,
        path: Path,
        blobs: Iterable[bytes | memoryview],
        placing: AbstractContextManager[None] | None = None,
    ) -> None:
        """Replace what is at `path`, whatever it is. placing: held while the finished file comes to its place."""
        self.require_writable()
        try:
            self._make_folder(path.parent)
            self._make_folder(self.tmp)
            write_atomically(path, blobs, self.tmp, self.file_mode(), placing or nullcontext())
        except OSError as error:
            raise self.failed("written", error) from None

    def remove(self, path: Path) -> bool:
        """Remove what is at `path`, a folder with all that is in it; whether there was anything."""
        try:
            path.unlink()
        except _MISSING:
            self.require_present()
            return False
        except OSError as error:
            try:
                self._make_folder(self.tmp)
                set_aside(path, self.tmp, error)
            except OSError as reason:
                raise self.failed("written", reason) from None
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

    def folders(self, path: Path | str) -> Iterator[os.DirEntry[str]]:
        """The folders in a folder."""
        for entry in self.scan(path):
            try:
                if entry.is_dir():
                    yield entry
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
        try:
            path.mkdir(0o700)
        except FileExistsError:
            if path.is_dir():  # another process made it meanwhile
                return
            if path.parent == self.root or path.is_symlink():  # not ours to remove
                raise
            path.unlink()
            path.mkdir(0o700)
        with suppress(OSError):  # a file system without permissions
            path.chmod(self._folder_mode())


def unusable(
    root: Path,
    error: OSError,
    doing: str = "written",
) -> StoreError:
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


def open_root(root: Path) -> StoreFiles:
    """Make `root` a store unless it is one, and tidy it. Raises `StoreError`, and touches nothing, if it is something else."""
    files = StoreFiles(root)
    try:
        make_root(files)
        store_id(root)
    except OSError as error:
        raise unusable(root, error) from None
    tidy(files)
    return files


def make_root(files: StoreFiles, new_id: str = "") -> None:
    """Make the root a store unless it is one. Raises `StoreError` when it is something else, and OSError.

    Of several machines that make it at the same time, one gives it its id where the file system has hard links.
    """
    root = files.root
    make_private_folder(root)
    names = [path.name for path in root.iterdir()]
    if MANIFEST not in names and not (root / MANIFEST).exists():
        _require_empty(root, names)
        manifest: dict[str, object] = {"kind": _KIND, "format": STORE_FORMAT}
        if new_id:
            manifest["id"] = new_id
        write_once(root / MANIFEST, as_json(manifest), files.file_mode())


def tidy(files: StoreFiles) -> None:
    """Withdraw other users' rights, and remove what killed writers left, as far as this user may."""
    _close_to_others(files.root)
    sweep(files.root)
    sweep(files.tmp)


def _close_to_others(root: Path) -> None:
    # The root alone keeps others out. A folder that the rest of the world may not enter was made so on purpose.
    with suppress(OSError):
        info = root.stat()
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid == os.geteuid() and mode & 0o007:
            root.chmod(mode & ~(0o007 if mode & stat.S_ISGID else 0o077))


def _require_empty(root: Path, names: list[str]) -> None:
    foreign = sorted(name for name in names if not _is_harmless(name))
    # Looked for once more: another process may have made the store between the two looks.
    if foreign and not (root / MANIFEST).exists():
        raise StoreError(
            f"{root} is not a store and not empty (it holds {foreign[0]!r}): choose an empty or new directory"
        )


def _is_harmless(name: str) -> bool:
    is_unfinished = name.startswith(".") and name.endswith(".tmp")
    return is_unfinished or name in _NOT_OURS_BUT_HARMLESS


def store_id(root: Path) -> str:
    """What tells the store at `root` from others, empty where it has no id.

    Raises `StoreError` for one that cannot be used, and OSError.
    """
    try:
        manifest = json.loads(_content(root / MANIFEST))
        kind = manifest["kind"]
        version = manifest["format"]
        id_ = manifest.get("id", "")
    except (ValueError, KeyError, TypeError, RecursionError):
        kind = None
        version = 0
        id_ = ""
    if kind != _KIND or type(version) is not int:
        raise StoreError(f"{root / MANIFEST} is damaged or not of kvblend: delete {root} or choose another directory")
    if version != STORE_FORMAT:
        raise StoreError(
            f"the store {root} has format {version}, this kvblend reads {STORE_FORMAT}: "
            "upgrade kvblend or choose another store"
        )
    return str(id_)


def _content(manifest: Path) -> bytes:
    """The first bytes of it, which the file server is asked for. Raises OSError."""
    with open(manifest, "rb", buffering=0, opener=_without_waiting) as file:
        return file.read(_MOST_BYTES) or b""


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class _ReadId(NamedTuple):
    """The id in a manifest. stamp: tells that file from others that took its place."""

    stamp: tuple[int, ...]
    id: str


class MountedFiles(StoreFiles):
    """The files of the store at `root`, which may not be there now.

    Args:
        root: where the store is.
        local: this machine's disk tier, which remembers the store's id; without one this process does.
        above: the store that this one lies in, which must be there when this one is made.

    """

    def __init__(
        self,
        root: Path,
        local: Backend | None = None,
        above: MountedFiles | None = None,
    ) -> None:
        super().__init__(root)
        self._local = local
        self._above = above
        self._expected: str | None = None
        self._last_read: _ReadId | None = None
        with suppress(StoreUnreachableError):
            if self._current_id() is not None:
                tidy(self)

    def require_present(self) -> None:
        """Raise `StoreUnreachableError` where the store that was seen here is not; one that was never made holds nothing."""
        current = self._current_id()
        expected = self._expected_id()
        if current == expected:
            return
        if expected is None:
            assert current is not None
            self._expect(current)
            return
        what = f"has no {MANIFEST}" if current is None else "holds another store than before"
        place = "" if self._local is None else f"; if that is on purpose, delete {self._local.place} to start anew"
        raise StoreUnreachableError(f"{self.root} {what}: see that the right file system is mounted{place}")

    def require_writable(self) -> None:
        """Have it made if it never was."""
        self.require_present()
        if self._current_id() is None:
            if self._above is not None:
                self._above.require_writable()
            try:
                make_root(self, uuid.uuid4().hex)
            except OSError as error:
                raise unusable(self.root, error) from None
            self.require_present()

    def open(self, path: Path) -> int | None:
        """Open a file, if the store is this one."""
        self.require_present()
        return super().open(path)

    def scan(self, path: Path | str) -> list[os.DirEntry[str]]:
        """Scan a folder, if the store is this one."""
        self.require_present()
        return super().scan(path)

    def failed(self, doing: str, error: OSError) -> StoreError:
        """A file that cannot be read is damage only where the store itself can be, which is asked of its server anew."""
        self._last_read = None
        return super().failed(doing, error)

    def _current_id(self) -> str | None:
        """The id of the store that is there now; read again when its manifest is another file."""
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

    def _expected_id(self) -> str | None:
        if self._expected is None and self._local is not None:
            content = self._local.read(_SEEN, _MOST_BYTES)
            self._expected = None if content is None else content.decode(errors="replace")
        return self._expected

    def _expect(self, current: str) -> None:
        self._expected = current
        if self._local is not None:
            self._local.put(_SEEN, [current.encode()])


@contextmanager
def locked(files: StoreFiles, name: str = ".writing") -> Iterator[None]:
    """Held by one thread of one process at a time; it ends with the process. Raises `StoreError` after ten minutes."""
    from filelock import FileLock, Timeout

    files.require_writable()
    path = files.root / name
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            files.remove(path)
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
