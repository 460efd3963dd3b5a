"""What searches found, as numbers with intervals and beside their controls."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlayers.search.cola import program_of
from jaxlayers.search.found import Found

RESAMPLES = 2000
SHOWN = 10  # programs in a table
ALL = "all"


class Share(NamedTuple):
    """A share of tasks, with the bounds that hold 95 % of its bootstrap draws."""

    value: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        if not self.tasks:
            return "no task"
        return f"{100 * self.value:.0f} % [{100 * self.low:.0f}, {100 * self.high:.0f}]"


def share(hits: Sequence[bool], seed: int = 0) -> Share:
    """Returns the share of hits; tasks are drawn again with replacement for the interval."""
    return _bootstrap(np.asarray(hits, float), seed)


def _bootstrap(values: np.ndarray, seed: int) -> Share:
    """Returns the mean of the values with its interval."""
    if not len(values):
        return Share(np.nan, np.nan, np.nan, 0)
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return Share(float(values.mean()), float(low), float(high), len(values))


def base(found: Found) -> bool:
    """Returns whether the plain model is right."""
    return found.scores[0].right


def solved(found: Found) -> bool:
    """Returns whether any program tried is right."""
    return found.shortest is not None


def shorter(found: Found) -> bool:
    """Returns whether a program shorter than the plain model is right."""
    return solved(found) and len(found.shortest.ids) < len(found.scores[0].ids)


def difference(a: Sequence[Found], b: Sequence[Found], what: Callable[[Found], bool], seed: int = 0) -> Share:
    """Returns the share in a less the share in b over the tasks both have, drawn in pairs."""
    other = {found.task.id: found for found in b}
    pairs = [(what(found), what(other[found.task.id])) for found in a if found.task.id in other]
    return _bootstrap(np.asarray([int(x) - int(y) for x, y in pairs], float), seed)


def summary(found: Sequence[Found]) -> dict[str, Any]:
    """Returns shares by condition and kind of task, and CoLa less each control.

    `solved` is the share of tasks with a right program, `shortened` that of the tasks the plain model gets
    right which a shorter program gets right, too, and `corrected` that of the tasks it gets wrong which some
    program gets right. A shuffled search asks for wrong answers: what it solves is what can be found where
    there is nothing to find.
    """
    names = list(dict.fromkeys(each.condition for each in found))
    by = {name: [each for each in found if each.condition == name] for name in names}
    kinds = [ALL, *dict.fromkeys(each.task.kind for each in found if each.task.kind)]
    table = {}
    for name in names:
        table[name] = {}
        for kind in kinds:
            part = [each for each in by[name] if kind in (ALL, each.task.kind)]
            table[name][kind] = {
                "tasks": len(part),
                "base": share([base(each) for each in part]),
                "solved": share([solved(each) for each in part]),
                "shortened": share([shorter(each) for each in part if base(each)]),
                "corrected": share([solved(each) for each in part if not base(each)]),
            }
    against = {}
    if "cola" in by:
        for name in names:
            if name != "cola":
                against[name] = {
                    "solved": difference(by["cola"], by[name], solved),
                    "shorter": difference(by["cola"], by[name], shorter),
                }
    return {"conditions": table, "cola_less": against}


def sentences(result: dict[str, Any]) -> list[str]:
    """Returns what exceeds its control and what does not, in words."""
    lines = []
    words = {"solved": "finds a right program", "shorter": "finds a right program below full length"}
    for name, shares in result["cola_less"].items():
        for what, gain in shares.items():
            points = f"{100 * gain.value:+.0f} points [{100 * gain.low:+.0f}, {100 * gain.high:+.0f}]"
            verdict = (
                "more often than"
                if gain.low > 0
                else "less often than"
                if gain.high < 0
                else "no more often than"
            )
            control = f"{name} search" if name in ("skip", "loop") else f"the {name} control"
            lines.append(f"CoLa {words[what]} {verdict} {control}: {points} over {gain.tasks} tasks.")
    cola = result["conditions"].get("cola")
    shown = (
        ("shortened", "right answers of the plain model", "have a shorter right program", 75),
        ("corrected", "wrong answers of the plain model", "have a right program", 60),
    )
    for key, of, what, published in shown if cola else ():
        if cola[ALL][key].tasks:
            lines.append(f"Of the {of} {cola[ALL][key]} {what} (published: above {published} %).")
    return lines


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a summary with its shares as JSON-able records."""
    if isinstance(result, Share):
        return {key: value for key, value in result._asdict().items() if value == value}  # NaN: no task
    return {key: plain(value) for key, value in result.items()} if isinstance(result, dict) else result


def show(result: dict[str, Any], found: Sequence[Found]) -> None:
    """Prints a summary as tables, with the best programs and what it says in words."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    columns = ("base", "solved", "shortened", "corrected")
    for kind in next(iter(result["conditions"].values())):
        table = Table(title=Text(f"{kind} tasks"), title_justify="left", show_edge=False)
        for name in ("condition", "tasks", *columns):
            table.add_column(name, justify="left" if name == "condition" else "right")
        for name, kinds in result["conditions"].items():
            row = kinds[kind]
            table.add_row(Text(name), str(row["tasks"]), *(str(row[column]) for column in columns))
        console.print(table)
    first = found[0].condition
    gains = [each for each in found if each.condition == first and solved(each)]
    gains = [each for each in gains if shorter(each) or not base(each)]
    if gains:
        gains.sort(key=lambda each: (base(each), len(each.shortest.ids) - len(each.scores[0].ids)))
        table = Table(title=Text(f"shortest right programs, {first}"), title_justify="left", show_edge=False)
        for name in ("task", "plain model", "layers", "program"):
            table.add_column(name, justify="right" if name == "layers" else "left")
        for each in gains[:SHOWN]:
            text = str(program_of(each.shortest.ids, len(each.scores[0].ids)))
            table.add_row(
                Text(each.task.id),
                "right" if base(each) else "wrong",
                str(len(each.shortest.ids)),
                Text(text),
            )
        if len(gains) > SHOWN:
            table.add_row(f"and {len(gains) - SHOWN} more", "", "", "")
        console.print(table)
    for line in sentences(result):
        console.print(f"- {line}", markup=False)
