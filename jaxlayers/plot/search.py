"""The picture of a search: what was found for each task, how long it is, and what the controls find.

The panels follow the figures of CoLa (arXiv 2507.07996): which layers its programs visit, and accuracy
against length; beside them stand the controls, which the paper does not have.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jaxlayers.plot.style import INK, TITLE, page, plain_axes
from jaxlayers.program_text import shorten
from jaxlayers.search.found import Found, Score
from jaxlayers.search.report import base, share, solved

_CONDITIONS = {  # name in the legend, colour, line style; the controls are dashed
    "cola": ("CoLa", "#8a4fbf", "-"),
    "skip": ("skips", "#2a6fbb", "-"),
    "loop": ("loops", "#e07b39", "-"),
    "random": ("random", "#3a9a6a", "--"),
    "shuffled": ("shuffled", "#c2304a", "--"),
}
_PLAIN = "plain"
_TRIED = "#9aa3af"
_TIMES = (("skipped", "#2a6fbb"), ("once", "#e9edf2"), ("twice", "#f2b184"), ("3 times or more", "#c2541b"))
_NAMED = 32  # rows of the heat map that have their own label; more are named by kind
_KINDS = 6  # kinds of tasks that the intervals are split by; more have no room


def search_figure(found: Sequence[Found], depth: int) -> Figure:
    """Returns the picture of the searches of a model with `depth` layers, under one condition or more.

    Left: how often CoLa's shortest right programs visit each layer, beside all it tried, and below, each of
    these programs. Right: the share of tasks with a right program of at most n visits, and below, with any
    right program, by kind of task with 95 % intervals. Where there is no CoLa the first condition takes its
    place. Raises ValueError where nothing was searched.
    """
    if not found:
        raise ValueError("there is no search to draw; search for at least one task.")
    by: dict[str, list[Found]] = {}
    for each in found:
        by.setdefault(each.condition, []).append(each)
    main = "cola" if "cola" in by else next(iter(by))
    rows = _rows(by[main])
    groups = _groups(by)

    below = max(1.3 + 0.21 * len(rows), 1.3 + 0.2 * len(groups) * (len(by) + 1))
    heights = 4.2, min(max(below, 2.4), 8.0)
    title = (
        f"A program for each task   ({_count(len(by[main]), 'task')}, {depth} layers, at most "
        f"{_count(max(len(each.scores) for each in found), 'program')} tried for each)"
    )
    figure = page(title, 0.7 + sum(heights), w_pad=0.1, h_pad=0.08, wspace=0.02, hspace=0.02)
    panels = figure.subplots(2, 2, height_ratios=heights, width_ratios=[1.25, 1])
    _draw_use(panels[0, 0], by[main], depth, main)
    _draw_lengths(panels[0, 1], by, depth, main)
    _draw_programs(panels[1, 0], rows, depth, heights[1])
    title = f"Shortest right programs: {_look(main)[0]}, {len(rows)} of {_count(len(by[main]), 'task')}"
    _entitle(panels[1, 0], title, handles=[Patch(color=colour, label=name) for name, colour in _TIMES])
    _draw_shares(panels[1, 1], by, groups)
    return figure


def times_visited(scores: Sequence[Score], depth: int) -> Int[np.ndarray, "N L"]:
    """Returns how often each of N programs visits each layer."""
    return np.asarray([np.bincount(score.ids, minlength=depth) for score in scores]).reshape(-1, depth)


def solved_within(found: Sequence[Found], most: int) -> Float[np.ndarray, " n"]:
    """Returns the share of searches with a right program of at most n visits, for n = 0 to `most`."""
    lengths = [len(each.shortest.ids) for each in found if each.shortest]
    return np.cumsum(np.bincount(lengths, minlength=most + 1)[: most + 1]) / len(found)


def _rows(found: Sequence[Found]) -> list[tuple[Found, Score]]:
    """Returns the searches that have a right program with their shortest, by kind, then by length."""
    kinds = list(dict.fromkeys(each.task.kind for each in found))
    rows = [(each, each.shortest) for each in found if each.shortest]
    return sorted(rows, key=lambda row: (kinds.index(row[0].task.kind), len(row[1].ids)))


def _groups(by: dict[str, list[Found]]) -> list[str | None]:
    """Returns the kinds that shares are given for, None for all tasks, where they differ from all."""
    kinds = list(dict.fromkeys(each.task.kind for part in by.values() for each in part))
    return [None, *kinds] if 1 < len(kinds) <= _KINDS else [None]


def _look(condition: str) -> tuple[str, str, str]:
    return _CONDITIONS.get(condition, (condition, INK, ":"))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _entitle(axes: Axes, text: str, **what: Any) -> None:
    """Puts the title above the axes and the legend in a line between them, where no curve can cross it."""
    axes.set_title(text, loc="left", pad=31, **TITLE)
    look = {"frameon": False, "fontsize": 10, "borderaxespad": 0.3, "columnspacing": 1.4, "handlelength": 1.8}
    axes.legend(loc="lower left", bbox_to_anchor=(-0.015, 1.0), ncols=8, **look, **what)


def _layer_axis(axes: Axes, depth: int) -> None:
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_xlabel("layer", fontsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))


def _nothing(axes: Axes) -> None:
    look = {"ha": "center", "va": "center", "fontsize": 12, "color": "#6b7280"}
    axes.text(0.5, 0.5, "no program tried was right", transform=axes.transAxes, **look)


def _draw_use(axes: Axes, found: Sequence[Found], depth: int, condition: str) -> None:
    name, colour, _ = _look(condition)
    axes.axhline(1, color="#c9ced6", linewidth=1.2, zorder=0)
    tried = [score for each in found for score in each.scores]
    right = [each.shortest for each in found if each.shortest]
    for scores, label, shade, marker in (
        (tried, f"all {_count(len(tried), 'program')} tried", _TRIED, "D"),
        (right, f"shortest right programs of {_count(len(right), 'task')}", colour, "o"),
    ):
        if scores:
            look = {"markersize": 7 if depth <= 40 else 4, "markeredgecolor": "white", "linewidth": 1.8}
            mean = times_visited(scores, depth).mean(axis=0)
            axes.plot(range(depth), mean, color=shade, marker=marker, label=label, **look)
    if not right:
        _nothing(axes)
    axes.set_ylabel("visits a program", fontsize=12, labelpad=8)
    axes.set_ylim(0, max(1.2, 1.1 * max(line.get_ydata().max() for line in axes.lines[1:])))
    _layer_axis(axes, depth)
    plain_axes(axes, "both")
    _entitle(axes, f"How often each layer runs: {name}")


def _draw_lengths(axes: Axes, by: dict[str, list[Found]], depth: int, main: str) -> None:
    most = max(len(score.ids) for part in by.values() for each in part for score in each.scores)
    asked = max(map(len, by.values()))
    plain = next((part for name, part in by.items() if name != "shuffled"), None)
    axes.axvline(depth, color="#c9ced6", linewidth=1.2, zorder=0)
    if plain:  # shuffled answers are not the plain model's task
        accuracy = float(np.mean([base(each) for each in plain]))
        axes.axhline(accuracy, color="#c9ced6", linewidth=1.2, zorder=0)
        look = {"marker": "s", "markersize": 8, "color": INK, "linestyle": "none", "markeredgecolor": "white"}
        axes.plot([depth], [accuracy], zorder=3, clip_on=False, label=_PLAIN, **look)
    for name, part in by.items():
        label, colour, line = _look(name)
        if len(part) < asked:  # the search was interrupted
            label += f" ({_count(len(part), 'task')})"
        first = {"linewidth": 2.6, "zorder": 2.5} if name == main else {"linewidth": 2}
        axes.step(
            range(most + 1), solved_within(part, most), line, where="post", color=colour, label=label, **first
        )
    axes.set_xlabel("visits allowed", fontsize=12)
    axes.set_ylabel("tasks with a right program", fontsize=12, labelpad=8)
    axes.set_xlim(0, 1.02 * max(most, depth))
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    plain_axes(axes, "both")
    _entitle(axes, "How short a right program can be")


def _draw_programs(axes: Axes, rows: Sequence[tuple[Found, Score]], depth: int, height: float) -> None:
    _layer_axis(axes, depth)
    plain_axes(axes, "x")
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks([])
    if not rows:
        _nothing(axes)
        return
    times = np.minimum(times_visited([score for _, score in rows], depth), len(_TIMES) - 1)
    colours = ListedColormap([colour for _, colour in _TIMES])
    pitch = 72 * min(height / len(rows), 8 / depth)  # points between cells
    axes.pcolormesh(
        np.arange(depth + 1) - 0.5,
        np.arange(len(rows) + 1) - 0.5,
        times,
        cmap=colours,
        norm=BoundaryNorm(np.arange(len(_TIMES) + 1) - 0.5, len(_TIMES)),
        edgecolors="white" if pitch > 4 else "none",
        linewidth=min(0.08 * pitch, 0.8),
    )
    room = max(len(rows), (height - 1.3) / 0.35)  # so that few rows are no broad bands
    axes.set_ylim(room - 0.5, -0.5)
    axes.spines[["left", "bottom"]].set_visible(False)
    _name_rows(axes, rows, depth, 0.2 * room / height)


def _name_rows(axes: Axes, rows: Sequence[tuple[Found, Score]], depth: int, apart: float) -> None:
    """Names the rows with their visits, or where they are many their kinds, at least `apart` rows apart."""
    sizes = Counter(found.task.kind for found, _ in rows)  # in order, because rows are sorted by kind
    starts = list(itertools.accumulate(sizes.values(), initial=0))
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color=INK, linewidth=1)
    if len(rows) <= _NAMED:
        places, names = range(len(rows)), [shorten(found.task.id, 24) for found, _ in rows]
        for place, (_, score) in enumerate(rows):
            look = {"va": "center", "fontsize": 9, "color": "#6b7280", "clip_on": False}
            at = {"xy": (depth - 0.5, place), "xytext": (6, 0), "textcoords": "offset points"}
            axes.annotate(f"{len(score.ids)}", **at, **look)
    else:
        places, names = [], []
        for (kind, size), start in zip(sizes.items(), starts, strict=False):
            middle = start + (size - 1) / 2
            if not places or middle - places[-1] > apart:
                places.append(middle)
                names.append(shorten(kind or "tasks", 24))
    axes.set_yticks(places, names, parse_math=False)
    axes.tick_params(axis="y", labelsize=9 if len(rows) <= _NAMED else 11)


def _draw_shares(axes: Axes, by: dict[str, list[Found]], groups: Sequence[str | None]) -> None:
    plain = next((part for name, part in by.items() if name != "shuffled"), [])
    series = [(plain, base, INK, "s")] if plain else []
    series += [(part, solved, _look(name)[1], "o") for name, part in by.items()]
    places, names, at = [], [], 0.0
    for kind in groups:
        first = at
        for part, what, colour, marker in series:
            hits = [what(each) for each in part if kind is None or each.task.kind == kind]
            if hits:  # an interrupted search may not have come to this kind
                value, low, high, _ = share(hits)
                axes.plot([low, high], [at, at], color=colour, linewidth=2.2, alpha=0.45)
                look = {"markersize": 8, "markeredgecolor": "white", "zorder": 3, "clip_on": False}
                axes.plot([value], [at], marker, color=colour, **look)
                place = {"xy": (1, at), "xytext": (12, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(f"{sum(hits)} of {len(hits)}", fontsize=9, color=colour, **place)
            at += 1
        count = len({each.task.id for part in by.values() for each in part if kind in (None, each.task.kind)})
        name = "all" if kind is None else shorten(kind or "no kind", 16)
        names.append(f"{name}\n{_count(count, 'task')}")
        places.append((first + at - 1) / 2)
        at += 0.8
    axes.set_ylim(max(at - 0.8, 4) - 0.3, -0.7)
    axes.set_xlim(0, 1)
    axes.set_yticks(places, names, parse_math=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("tasks with a right program (line: 95 % interval)", fontsize=12)
    plain_axes(axes, "x")
    axes.tick_params(axis="y", length=0, pad=10)
    axes.spines["left"].set_visible(False)
    handles = [Line2D([], [], marker="s", color=INK, linestyle="none", label=_PLAIN)] if plain else []
    handles += [
        Line2D([], [], marker="o", color=_look(name)[1], linestyle="none", label=_look(name)[0])
        for name in by
    ]
    controls = ", and what the controls find" if {"random", "shuffled"} & set(by) else ""
    _entitle(axes, f"What is found{controls}", handles=handles)
