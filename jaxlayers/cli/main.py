"""The process: runs a command, prints its result, and tells errors in one sentence and an exit status.

Every command returns its result as a dict, which `--json` prints as the only thing on stdout. What is slow to
import is imported inside the commands, so that `--help` and wrong usage answer at once.
"""

import contextlib
import io
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jaxlayers.cli.output import Args, Interrupted, strict
from jaxlayers.cli.parser import make_parser

FAILURE, WRONG_INPUT = 1, 2
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143  # as shells report signals
WRONG = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 2 for wrong input, 1 for a failure, 130 for Ctrl-C."""
    debug = False
    _mend_streams()
    try:
        args = make_parser().parse_args(argv)
        debug = args.debug
        with _quiet(args):
            # Libraries may print, too; under --json that goes nowhere.
            with contextlib.redirect_stdout(io.StringIO()) if args.json else contextlib.nullcontext():
                result = args.run(args)
        if args.json:
            print(json.dumps(strict(result), allow_nan=False))
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # of --help, --version and SIGTERM
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        if isinstance(stop, Interrupted) and args.json:
            print(json.dumps(strict(stop.result), allow_nan=False))
        print("\njaxlayers: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"jaxlayers: {_sentence(error)}", file=sys.stderr)
        _flushed()
        return WRONG_INPUT if isinstance(error, WRONG) else FAILURE


def entry() -> NoReturn:
    """Runs the command line as a whole process, which ends here."""

    def terminate(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the cleaning up
        raise SystemExit(TERMINATED)

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    status = main()
    if not _flushed():
        status = status or FAILURE
    if status in (INTERRUPTED, TERMINATED):
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)  # threads that compile would crash an interpreter that is being taken down
    sys.exit(status)


def _mend_streams() -> None:
    """Gives closed standard streams a place to go, and stdout a way to write any text."""
    # In this order, because each takes the lowest free descriptor, which is its own.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "").replace("_", "")
    if encoding != "utf8" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flushed() -> bool:
    """Flushes stdout, or where that fails drops what it holds, of which the interpreter would complain."""
    try:
        sys.stdout.flush()
        return True
    except (OSError, ValueError):
        _drop_stdout()
        return False


def _drop_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _quiet(args: Args) -> Iterator[None]:
    """Keeps warnings that are for programmers off stderr; errors still come."""
    if args.debug:
        yield
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # C++: warnings and below, read when jax is imported
    if args.json:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        yield


def _sentence(error: Exception) -> str:
    """Returns what is wrong as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) and text:
        return text
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text):
        return (
            "memory ran out; use fewer tokens at a time (--window, --max-tokens, a shorter prompt), "
            "load the weights with --dtype bfloat16, or take a smaller model."
        )
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        what_to_do = "; check the path" if isinstance(error, WRONG) else ""
        return f"{os.fspath(error.filename)!r}: {error.strerror.lower()}{what_to_do}."
    if isinstance(error, OSError) and error.strerror:
        return f"cannot write the output: {error.strerror.lower()}."
    if isinstance(error, ValueError | OSError) and text:
        return text if text.endswith((".", "?")) else f"{text}."
    detail = f"{type(error).__name__}: {text}"[:300]
    return f"this is a fault of jaxlayers ({detail}); run it again with --debug and report the traceback."
