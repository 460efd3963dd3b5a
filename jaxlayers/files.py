"""Files that are written whole or not at all, and the folders they go to."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a name to write to, which becomes `path` when the block ends.

    A reader sees the old file or the new one, never half of it; where the block fails, nothing is left.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):  # what went wrong is told by the block
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Keeps other processes from reserving the same file; raises ValueError where one has."""
    import filelock

    lock = path.with_name(f".{path.name}.lock")
    try:
        with filelock.FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except filelock.Timeout:
        raise ValueError(f"another process is at work on {path}; wait for it or name another file.") from None


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder, and removes it again when the block fails and leaves it empty."""
    folder = Path(path)
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if not there:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
