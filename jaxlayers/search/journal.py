"""The journal of a search: what was scored, so that a killed search goes on and scores nothing twice."""

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxlayers.search.found import Score


class Journal:
    """Scores by group and epoch, a checked line each; a line that a kill left half-written is dropped.

    Raises ValueError where the file is the journal of a search with another fingerprint.
    """

    def __init__(self, path: Path, fingerprint: str):
        self.path = path
        self._known: dict[tuple[int, int], list[list[Score]]] = {}
        lines, good, data = [], 0, b""
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            for line in data.splitlines(keepends=True):
                entry = _checked(line)
                if entry is None:
                    break
                good += len(line)
                lines.append(entry)
        if not lines and not _line(fingerprint).startswith(data):  # a kill may have torn it
            raise ValueError(f"{path} is not the journal of a search; move it away, so that it is not lost.")
        if lines and lines[0] != fingerprint:
            raise ValueError(
                f"{path} is the journal of a search with other tasks, model or settings; "
                "move it away, or finish that search first."
            )
        for group, epoch, scores in lines[1:]:
            self._known[group, epoch] = [
                [Score(tuple(ids), right, np.nan if value is None else value) for ids, right, value in task]
                for task in scores
            ]
        if good and good < path.stat().st_size:
            os.truncate(path, good)
        if not lines:
            path.unlink(missing_ok=True)
            self._write(fingerprint)

    def scores(self, group: int, epoch: int) -> list[list[Score]] | None:
        """Returns the scores of an epoch by task, or None where it is not journalled."""
        return self._known.get((group, epoch))

    def remove(self) -> None:
        """Removes the file, once the result is written."""
        self.path.unlink(missing_ok=True)

    def append(self, group: int, epoch: int, scores: list[list[Score]]) -> None:
        """Adds an epoch; raises OSError in one sentence where it cannot be written."""
        self._write([group, epoch, [[[list(s.ids), s.right, s.written] for s in task] for task in scores]])

    def _write(self, entry: Any) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(_line(entry))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"cannot write the journal {self.path}: {error.strerror}; what it holds is kept, and the "
                "same command goes on from there."
            ) from error


def _line(entry: Any) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _checked(line: bytes) -> Any:
    """Returns the entry of a journal line, None where it is damaged."""
    check, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or check != f"{zlib.crc32(text[:-1]):08x}".encode():
        return None
    return json.loads(text)
