"""What commands read: texts, programs and models."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlayers.cli.output import Args, note

if TYPE_CHECKING:
    from jaxlayers.program import Program
    from jaxlayers.weights.hub import Model


def read_program(text: str | None, depth: int) -> "Program":
    from jaxlayers.program import Program, identity

    if text is None:
        return identity(depth)
    return Program.read(text[1:], depth) if text.startswith("@") else Program.parse(text, depth)


def load_model(args: Args) -> "Model":
    from jaxlayers import startup
    from jaxlayers.weights import hub

    startup.start()
    note(args, f"loading {args.model} ...")
    return hub.load(args.model, args.dtype)


def read_text(path: str) -> str:
    if not path:
        raise ValueError("--text is empty; name a file of UTF-8 text.")
    data = Path(path).read_bytes()
    text = _utf8(data, path)
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text of at least two tokens.")
    return text


def read_stdin() -> str:
    """Returns standard input without the newline that ends its last line."""
    stdin = getattr(sys.stdin, "buffer", sys.stdin)
    data = stdin.read()
    text = data if isinstance(data, str) else _utf8(data, "standard input")
    return text.removesuffix("\n")


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text at byte {error.start}; save it as UTF-8.") from error
