"""The interventions of "Transformer layers as painters" (arXiv 2407.09298), on any model.

The first N and the last N layers are kept and those between them changed, for every N; beside that, each
layer is deleted alone and each pair of neighbours swapped. All of it is programs, so that two compilations
run the whole suite: one for the programs that run one layer after another, one for those with lanes.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlayers.decoder.stack import Decoder, fastest_form
from jaxlayers.demo import times
from jaxlayers.evaluate import nll_of
from jaxlayers.execute.rows import forward
from jaxlayers.files import replacing
from jaxlayers.generate.decode import CAUSE, check_ids
from jaxlayers.program import (
    Program,
    common_shape,
    identity,
    looped_parallel,
    middle_repeat,
    parallel,
    reverse,
    shuffle,
    skip,
)
from jaxlayers.program_text import shorten

SEEDS = 10  # random orders, as in the paper
LOOPS = 3  # of the looped parallel layers, as in the paper
CHEAP = 0.1  # nats/token
TIE = 1e-4  # nats/token; what equal programs may differ by in float32
PICTURE, NUMBERS = "painters.png", "painters.json"
NAMES = {  # of the interventions, as the paper writes them
    "skip": "Skip",
    "middle_repeat": "Middle Repeat",
    "reverse": "Reverse",
    "random": "Random Order",
    "parallel": "Parallel",
    "looped_parallel": "Looped Parallel",
}

Results = dict[str, Any]


# --- the programs -------------------------------------------------------------------------------------------


def sizes(depth: int) -> range:
    """Returns how many layers stand between the first N and the last N, for every N from 1, few to many.

    Raises ValueError where there is none between the first and the last.
    """
    if depth < 3:
        raise ValueError(
            f"the model has {depth} layer{'s' * (depth != 1)}, and the first and the last are kept; "
            "take a model of at least 3."
        )
    return range(2 - depth % 2, depth - 1, 2)


def middle(depth: int, size: int) -> tuple[int, int]:
    """Returns the first and the last of the `size` layers in the middle."""
    start = (depth - size) // 2
    return start, start + size - 1


def interventions(depth: int, seeds: int = SEEDS) -> dict[str, dict[int, list[Program]]]:
    """Returns the programs of each intervention by the number of layers it changes.

    A list holds one program, for the random order one a seed. With one layer to change, all but skipping
    and looping it are the plain model.
    """
    build: dict[str, Callable[[int, int], list[Program]]] = {
        "skip": lambda start, stop: [skip(depth, range(start, stop + 1))],
        "middle_repeat": lambda start, stop: [middle_repeat(depth, start, stop)],
        "reverse": lambda start, stop: [reverse(depth, start, stop)],
        "random": lambda start, stop: [shuffle(depth, start, stop, seed) for seed in range(seeds)],
        "parallel": lambda start, stop: [parallel(depth, start, stop, "mean")],
        "looped_parallel": lambda start, stop: [looped_parallel(depth, start, stop, LOOPS)],
    }
    return {name: {size: made(*middle(depth, size)) for size in sizes(depth)} for name, made in build.items()}


def deletions(depth: int) -> list[Program]:
    """Returns the plain model without each layer."""
    return [skip(depth, [layer]) for layer in range(depth)]


def swaps(depth: int) -> list[Program]:
    """Returns the plain model with each pair of adjacent layers the other way round."""
    return [reverse(depth, layer, layer + 1) for layer in range(depth - 1)]


# --- measuring them -----------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What one program does to a text; None where its numbers overflow, because JSON has no NaN."""

    nll: float | None  # mean over the predicted tokens, in nats
    agreement: float | None  # share of tokens after which the likeliest next token is the plain model's


def painters(
    decoder: Decoder,
    ids: Sequence[int],
    seeds: int = SEEDS,
    report: Callable[[int, int], None] | None = None,
) -> Results:
    """Returns the loss of a text, read as one window, under every program of the suite, and what that says.

    Programs that are equal run once. `report(done, all)` is called after each. The result is what
    painters.json holds: under `interventions` a point for each number of changed layers, the mean over its
    programs and their range (`low`, `high`); under `delete` and `swap` a reading for each layer and pair; in
    `order`, `claims` and `findings` what follows; in `not_finite` the programs that overflow, whose numbers
    are None.

    Raises ValueError for a model of fewer than 3 layers, fewer than 1 seed, a text of fewer than 2 tokens,
    beyond the context or with unknown ids, and for a plain model whose loss is not finite.
    """
    config = decoder.config
    L = config.layers
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, not {seeds}.")
    if not 2 <= len(ids) <= config.context:
        raise ValueError(
            f"the text has {len(ids)} token{'s' * (len(ids) != 1)}; from 2 to the model's context of "
            f"{config.context} can be read."
        )
    check_ids(decoder, [ids], "the text")
    changed, deleted, swapped = interventions(L, seeds), deletions(L), swaps(L)
    everything = [*deleted, *swapped]
    everything += [
        program for curve in changed.values() for programs in curve.values() for program in programs
    ]
    compiled = reading._cache_size()
    read = readings(decoder, ids, everything, report)
    plain = read[identity(L)]

    def at(program: Program) -> dict[str, Any]:
        return {"program": str(program), **read[program]._asdict()}

    def point(size: int, programs: Sequence[Program]) -> dict[str, Any]:
        found = [read[program] for program in programs]
        losses, agreements = [each.nll for each in found], [each.agreement for each in found]
        return {
            "affected": size,
            "layers": list(middle(L, size)),
            "nll": _whole(np.mean, losses),
            "low": _whole(np.min, losses),
            "high": _whole(np.max, losses),
            "agreement": _whole(np.mean, agreements),
            "programs": [at(program) for program in programs],
        }

    results: Results = {
        "layers": L,
        "tokens": len(ids),
        "seeds": seeds,
        "vocabulary": config.vocab,
        "programs_run": len(read),
        "compilations": reading._cache_size() - compiled,
        "nll": plain.nll,
        "interventions": {
            name: [point(size, programs) for size, programs in curve.items()]
            for name, curve in changed.items()
        },
        "delete": [{"layer": layer, **at(program)} for layer, program in enumerate(deleted)],
        "swap": [{"layers": [layer, layer + 1], **at(program)} for layer, program in enumerate(swapped)],
        "not_finite": [str(program) for program, each in read.items() if each.nll is None],
    }
    results["order"] = order(results)
    results["claims"] = claims(results)
    results["findings"] = findings(results)
    return results


def readings(
    decoder: Decoder,
    ids: Sequence[int],
    programs: Iterable[Program],
    report: Callable[[int, int], None] | None = None,
) -> dict[Program, Reading]:
    """Returns a reading for the plain model and each distinct program.

    Raises ValueError where the loss of the plain model is not finite.
    """
    plain = identity(decoder.config.layers)
    programs = list(dict.fromkeys([plain, *programs]))
    decoder = fastest_form(decoder)
    tokens = np.asarray([ids], np.int32)
    likeliest: Int[np.ndarray, "1 T"] | None = None
    read: dict[Program, Reading] = {}
    # A row costs more in a table with lanes, so the programs without run in one of their own, the plain
    # model first.
    for wide in (False, True):
        part = [program for program in programs if (program.lanes > 1) == wide]
        shape = common_shape(part) if part else ()
        for program in part:
            losses, top = map(np.asarray, reading(decoder, tokens, program.pad(*shape)))
            likeliest = top if likeliest is None else likeliest
            loss = float(losses.mean(dtype=np.float64))
            if math.isfinite(loss):
                read[program] = Reading(loss, float((top == likeliest).mean()))
            elif program == plain:
                raise ValueError(f"the plain model, program {plain}, gives a loss of {loss}; {CAUSE}.")
            else:
                read[program] = Reading(None, None)
            if report:
                report(len(read), len(programs))
    return read


@jax.jit
def reading(
    decoder: Decoder, tokens: Int[Array, "B T"], program: Program
) -> tuple[Float[Array, "B T-1"], Int[Array, "B T"]]:
    """Returns -log p(token t+1 | tokens 0..t) in nats, and the likeliest token after each."""
    logits = forward(decoder, tokens, program)
    return nll_of(logits, tokens), logits.argmax(axis=-1)


def _whole(reduce: Callable[..., Any], values: Sequence[float | None]) -> float | None:
    """Returns a number over all values, or None where one is missing."""
    known = [value for value in values if value is not None]
    return float(reduce(known)) if len(known) == len(values) else None


# --- what the numbers say -----------------------------------------------------------------------------------


def change(results: Results, name: str) -> dict[int, float]:
    """Returns by how much an intervention changes the loss, by the number of layers it changes."""
    points = results["interventions"][name]
    return {point["affected"]: _cost(point, results) for point in points}


def _cost(reading: dict[str, Any], results: Results) -> float:
    """Returns the loss of a reading less that of the plain model, NaN where it is not finite."""
    return math.nan if reading["nll"] is None else reading["nll"] - results["nll"]


def order(results: Results) -> list[dict[str, Any]]:
    """Returns the interventions for each number of changed layers, the most damaging first.

    Those whose loss is not finite are left out.
    """
    curves = {name: change(results, name) for name in results["interventions"]}
    found = []
    for size in sizes(results["layers"]):
        known = {name: curve[size] for name, curve in curves.items() if math.isfinite(curve[size])}
        found.append({"affected": size, "worst_first": sorted(known, key=lambda name: -known[name])})
    return found


def claims(results: Results) -> list[dict[str, Any]]:
    """Returns the paper's claims about the order of damage, and with how many layers changed each holds.

    A claim is open where the losses differ by rounding only, as those of equal programs do, or where one is
    not finite.
    """
    curves = {name: change(results, name) for name in results["interventions"]}
    stated = {  # claim: the worse one, those it is worse than
        "Middle Repeat is the worst": ("middle_repeat", [n for n in NAMES if n != "middle_repeat"]),
        "Random Order is better than Reverse": ("reverse", ["random"]),
        "Looped Parallel is better than Parallel": ("parallel", ["looped_parallel"]),
    }
    found = []
    for claim, (worse, others) in stated.items():
        places: dict[str, list[int]] = {"holds": [], "fails": [], "open": []}
        for size in sizes(results["layers"]):
            losses = [curves[name][size] for name in (worse, *others)]
            gap = losses[0] - np.max(losses[1:])  # NaN where one is
            verdict = "holds" if gap >= TIE else "fails" if gap <= -TIE else "open"
            places[verdict].append(size)
        found.append({"claim": claim, "worse": worse, "than": others, **places})
    return found


def findings(results: Results) -> list[str]:
    """Returns what the numbers say, in sentences."""
    L, plain = results["layers"], results["nll"]
    half = min(results["order"], key=lambda each: abs(each["affected"] - L / 2))
    size = half["affected"]
    points = {
        name: next(p for p in curve if p["affected"] == size)
        for name, curve in results["interventions"].items()
    }
    listed = ", ".join(
        f"{NAMES[name]} {points[name]['nll'] - plain:+.3f} ({100 * points[name]['agreement']:.0f} %)"
        for name in half["worst_first"]
    )
    start, stop = middle(L, size)
    layers = f"layers {start}-{stop}" if size > 1 else f"layer {start}"
    said = [
        f"With {size} of {L} layers changed ({layers}), from worst to best, in nats/token, and how often the "
        f"likeliest next token is the plain model's: {listed}."
    ]
    said += [f'The paper\'s "{each["claim"]}" {_verdict(each, results)}.' for each in results["claims"]]
    said += _alone(results)
    if results["not_finite"]:
        said.append(f"No finite loss, so left out above: {shorten('; '.join(results['not_finite']), 300)}.")
    return said


def _verdict(claim: dict[str, Any], results: Results) -> str:
    holds, fails = claim["holds"], claim["fails"]
    decided = len(holds) + len(fails)
    if not decided:
        return "cannot be told here"
    said = f"holds here for {len(holds)} of {decided} size{'s' * (decided > 1)} of the middle"
    if not fails:
        return said
    worst = {each["affected"]: each["worst_first"][0] for each in results["order"]}
    instead = " and ".join(NAMES[name] for name in dict.fromkeys(worst[size] for size in fails))
    blame = f" (the worst there: {instead})" if len(claim["than"]) > 1 else ""
    return f"{said}, not for {shorten(', '.join(map(str, fails)), 80)}{blame}"


def _alone(results: Results) -> list[str]:
    """Returns sentences about single layers and pairs."""
    deleted, swapped = ([_cost(each, results) for each in results[key]] for key in ("delete", "swap"))
    said = []
    told = (
        ("Deleting one layer", deleted, lambda layer: f"layer {layer}"),
        ("Swapping two neighbours", swapped, lambda layer: f"layers {layer} and {layer + 1}"),
    )
    for what, costs, name in told:
        known = {place: cost for place, cost in enumerate(costs) if math.isfinite(cost)}
        if known:
            most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
            cheap = sum(cost < CHEAP for cost in known.values())
            said.append(
                f"{what} costs most at {name(most)} ({known[most]:+.3f}) and least at {name(least)} "
                f"({known[least]:+.3f}); {cheap} of {len(known)} cost less than {CHEAP} nats/token."
            )
    pairs = zip(itertools.pairwise(deleted), swapped, strict=True)
    known_pairs = [(a, b, swap) for (a, b), swap in pairs if math.isfinite(a + b + swap)]
    if known_pairs:
        fewer = sum(swap < min(a, b) for a, b, swap in known_pairs)
        said.append(
            f"A swap costs less than deleting either of the two for {fewer} of {len(known_pairs)} pairs."
        )
    return said


# --- files and tables ---------------------------------------------------------------------------------------


def write(results: Results, folder: Path) -> None:
    """Writes painters.json and painters.png, each whole or not at all; OSError where it cannot."""
    with replacing(folder / NUMBERS) as temporary:
        text = json.dumps(results, indent=1, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    from jaxlayers.plot import painters_figure  # matplotlib is slow to import

    with replacing(folder / PICTURE) as temporary:
        painters_figure(results).savefig(temporary, format="png")


def show(results: Results) -> None:
    """Prints the curves as a table, and what they say."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{results['layers']} layers, {results['tokens']} tokens of text, plain loss {results['nll']:.4f} "
        f"nats/token. {results['programs_run']} different programs, "
        f"compiled {times(results['compilations'])}.\n"
    )
    console.print(
        "Change of loss in nats/token by how many layers in the middle are changed\n"
        f"(Random Order: mean and range of {results['seeds']})\n"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", justify="right")
    for name in results["interventions"]:
        table.add_column(NAMES[name].replace(" ", "\n"), justify="right")
        if name == "random":
            table.add_column("range", justify="right", no_wrap=True)
    plain = results["nll"]

    def signed(value: float | None, digits: int = 3) -> str:
        return "NaN" if value is None else f"{round(value - plain, digits) + 0.0:+.{digits}f}"

    for number, size in enumerate(sizes(results["layers"])):
        cells = [str(size)]
        for name, curve in results["interventions"].items():
            point = curve[number]
            cells.append(signed(point["nll"]))
            if name == "random":
                cells.append(f"{signed(point['low'], 2)}..{signed(point['high'], 2)}")
        table.add_row(*cells)
    console.print(table)
    console.print()
    for line in results["findings"]:
        console.print(f"- {line}")
