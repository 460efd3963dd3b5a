"""Reading JSON that others wrote: every fault is one sentence that names the file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 160  # characters of a foreign value in a message


def quoted(value: Any) -> str:
    """Returns a foreign value for a message: on one line, and cut where it is long."""
    if isinstance(value, str):
        value = value[: LONGEST + 1]
    try:
        text = repr(value)
    except (
        RecursionError,
        ValueError,
    ):  # nested beyond what repr follows, or a whole number of too many digits
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object in data.

    Raises ValueError naming `where` when it is not UTF-8, not JSON, no object, holds a key twice, NaN or
    infinity, or is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {quoted(key)} stands twice")
            found[key] = value
        return found

    def constant(text: str) -> None:
        raise ValueError(f"{text} is no JSON number")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text at byte {error.start}.") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply for a file of its kind.") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {str(error)[:LONGEST]}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {type(value).__name__} where a JSON object is due.")
    return value


def read_json(path: Path, limit: int = 16 << 20) -> dict[str, Any]:
    """Returns the JSON object in a file of at most `limit` bytes; raises as `parse_json`, and OSError."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes, too large for a file of its kind.")
    return parse_json(data, str(path))


def json_lines(
    path: str | os.PathLike[str], limit: int, one: str, many: str
) -> Iterator[tuple[int, str, bytes]]:
    """Yields the number, name and bytes of each line of a file, whose lines hold one `one` each.

    Raises ValueError, naming the line, for one longer than `limit` bytes, because a device file may never end
    a line, and OSError in one sentence where the file cannot be read.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(limit + 1), b""), 1):
                where = f"{name}, line {number}"
                if len(line) > limit:
                    raise ValueError(f"{where} is longer than {limit} bytes; is it a {one}?")
                yield number, where, line
    except OSError as error:
        raise type(error)(f"cannot read the {many} in {name}: {error.strerror}.") from error
