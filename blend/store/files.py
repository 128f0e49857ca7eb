"""The files of a disk store: whole or not there, for their owner alone, and errors sorted into damage and outage.

An error that lies in one file (it is no file, the disk cannot read it) is damage: `EntryDamagedError`, and what it held is made
again. Every other (no permission, too many open files, a file system that is gone) is an outage: `StoreError`. To take that for
a missing file would compute the whole store again.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.files import set_aside, write_atomically

MANIFEST = "store.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
# Of a network file system that does not answer, or whose mount is gone.
_AWAY = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENODEV,
    errno.ENXIO,
    errno.ESHUTDOWN,
    getattr(errno, "EREMOTEIO", errno.EIO),
)
# EUCLEAN is how Linux file systems report broken structures of their own; other systems have no such number.
_ONE_FILE = (
    errno.EIO,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", errno.EIO),
    errno.ELOOP,
    errno.EISDIR,
    errno.ENXIO,
    errno.ENODEV,
)
_MISSING = (FileNotFoundError, NotADirectoryError)


class StoreFiles:
    """Files and folders below `root`. Everything written is closed to other users, whatever the process's umask.

    Where the setgid bit is set on `root`, the rights that its group has there are those that it has on everything written
    from then on: that is how a store is shared between users.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.tmp = root, root / "tmp"

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
        """Descriptor of a file, which the caller closes; None when there is none.

        Raises `EntryDamagedError` for what is there and no file. Waits for nobody, as opening a pipe would.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except _MISSING:
            self.require_present()
            return None
        except OSError as error:
            raise self.failed("read", error) from None
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        raise EntryDamagedError("it is not a file")

    def read(self, path: Path, most: int) -> bytes | None:
        """What is in a file, or None when there is none. Raises `EntryDamagedError` above `most` bytes."""
        descriptor = self.open(path)
        if descriptor is None:
            return None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if os.fstat(descriptor).st_size > most:
                raise EntryDamagedError(f"it is longer than {most} bytes")
            try:
                return file.readall()
            except OSError as error:
                raise self.failed("read", error) from None

    def write(
        self, path: Path, blobs: Iterable[bytes | memoryview], placing: AbstractContextManager[None] | None = None
    ) -> None:
        """Replace what is at `path`, whatever it is. placing: held while the finished file comes to its place."""
        self.require_writable()
        try:
            self._make_folder(path.parent)
            self._make_folder(self.tmp)
            write_atomically(path, blobs, self.tmp, self.file_mode(), placing or nullcontext())
        except OSError as error:
            raise self.failed("written", error) from None

    def write_new(
        self, path: Path, blobs: Iterable[bytes | memoryview], placing: AbstractContextManager[None] | None = None
    ) -> bool:
        """`write` where nothing is at `path`, and only there; whether that was so. Needs a file system with hard links."""
        spare = self.spare(self.tmp)
        self.write(spare, blobs)
        try:
            self._make_folder(path.parent)
            with placing or nullcontext():
                return linked(spare, path)
        except OSError as error:
            raise self.failed("written", error) from None
        finally:
            with suppress(OSError):
                spare.unlink()

    def spare(self, folder: Path) -> Path:
        """A new name in a folder, like that of a file which another machine is writing.

        Should this process be killed, it is swept after an hour.
        """
        return folder / f".00000000-{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp"

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
        """The error to raise for one of the operating system: damage of one file that was "read", or an outage.

        Raises `StoreUnreachableError` where what looks like the former is the whole store's.
        """
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
    elif error.errno in _AWAY:
        remedy = "see that its disk is well, mounted and writable"
    else:
        remedy = "make the directory writable or choose another one"
    kind = StoreUnreachableError if error.errno in _AWAY else StoreError
    return kind(f"the store {root} cannot be {doing} ({error.strerror or error}): {remedy}")


def linked(spare: Path, path: Path) -> bool:
    """Have a file under a second name, if nothing has that name; whether that was so. Raises OSError."""
    try:
        os.link(spare, path)
    except FileExistsError:
        return False
    return True
