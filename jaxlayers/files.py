"""Files that are written whole or not at all."""

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
