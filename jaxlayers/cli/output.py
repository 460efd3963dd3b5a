"""What commands print (notes, progress, tables), and the pictures they write."""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlayers.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = ".png", ".svg", ".pdf"
Args = argparse.Namespace
Result = dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the result so far."""

    def __init__(self, result: Result):
        self.result = result


def _on_terminal(args: Args) -> bool:
    return sys.stderr.isatty() and not args.json


def note(args: Args, text: str) -> None:
    """Tells on a terminal what is going on."""
    if _on_terminal(args):
        print(f"\033[2m{text}\033[0m", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(args: Args, text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function (done, total) that moves a bar on a terminal, else None."""
    if not _on_terminal(args):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def check_picture(path: Path) -> None:
    """Raises ValueError where the name of a picture is not that of a format it can be written in."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--picture {str(path)!r} must end in {', '.join(PICTURES)}.")
    if not path.parent.is_dir():
        raise ValueError(f"--picture {str(path)!r} must be in a folder that exists; make the folder first.")


def picture_of(args: Args, beside: Path) -> Path:
    """Returns where the picture of the results in `beside` goes: --picture, else the same name with .png."""
    path = args.picture or beside.with_suffix(".png")
    check_picture(path)
    if path.resolve() == beside.resolve():
        raise ValueError(f"the picture would replace the results in {str(path)!r}; name it with --picture.")
    return path


def save(figure: "Figure", path: Path) -> None:
    """Writes a picture, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower())


def print_table(args: Args, result: Result, digits: int = 6) -> None:
    if args.json:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for key, value in _flat(result):
        table.add_row(key.replace("_", " "), _shown(value, digits))
    Console(markup=False, soft_wrap=True, highlight=False).print(table)


def _flat(result: Result, before: str = "") -> Iterator[tuple[str, Any]]:
    """Gives the pairs of a dict, those of a dict inside it with both keys."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key} ")
        else:
            yield f"{before}{key}", value


def _shown(value: Any, digits: int) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_shown(each, digits) for each in value)
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if type(value) is int else str(value)


def strict(value: Any) -> Any:
    """Returns value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(each) for key, each in value.items()}
    return [strict(each) for each in value] if isinstance(value, list | tuple) else value
