"""The picture of the painters' suite: what changing the middle layers costs, and each layer alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from jaxlayers.measure.painters import NAMES, interventions, middle, sizes
from jaxlayers.plot.program import draw_program
from jaxlayers.plot.style import Costs, draw_costs, entitle, loss_axis, page, plain_axes

_COLOURS = {
    "skip": "#2a6fbb",
    "middle_repeat": "#c2304a",
    "reverse": "#e07b39",
    "random": "#b58a00",
    "parallel": "#8a4fbf",
    "looped_parallel": "#3a9a6a",
}
_MARKERS = dict(zip(_COLOURS, "osvDX^", strict=True))
_FAINT = "#9aa3af"
_DRAWN = 5  # layers changed in the small pictures, of two more on either side


def painters_figure(results: dict[str, Any]) -> Figure:
    """The losses by number of changed layers, what the changes look like, and what each layer is worth."""
    title = (
        f"Transformer layers as painters   ({results['model']}, {results['layers']} layers, "
        f"{results['tokens']} tokens, plain loss {results['nll']:.3f} nats/token)"
    )
    figure = page(title, 11, w_pad=0.08, h_pad=0.08, wspace=0.02, hspace=0.03)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.35, 1])
    left, right = top.subfigures(1, 2, width_ratios=[1.7, 1])
    _draw_curves(left.subplots(), results)
    _draw_pictures(right)
    _draw_layers(bottom.subplots(), results)
    return figure


def _change(points: Sequence[dict[str, Any]], plain: float, key: str = "nll") -> np.ndarray:
    """Returns the changes of loss, NaN, which leaves a gap, where a loss is not finite."""
    return np.asarray([np.nan if p[key] is None else p[key] - plain for p in points])


def _draw_curves(axes: Axes, results: dict[str, Any]) -> None:
    plain, ends = results["nll"], {}
    axes.axhline(0, color=_FAINT, linewidth=1)
    seen = [0.0]
    for name, points in results["interventions"].items():
        x = [p["affected"] for p in points]
        y, low, high = (_change(points, plain, key) for key in ("nll", "low", "high"))
        if name == "random":
            axes.fill_between(x, low, high, color=_COLOURS[name], alpha=0.2, linewidth=0, zorder=1)
        axes.plot(
            x,
            y,
            color=_COLOURS[name],
            marker=_MARKERS[name],
            markersize=6 if name == "random" else 8,
            linewidth=1.8,
            markeredgecolor="white",
            label=NAMES[name],
            zorder=3,
        )
        finite = np.flatnonzero(np.isfinite(y))
        if len(finite):
            ends[name] = x[finite[-1]], y[finite[-1]]
        seen += [*low[np.isfinite(low)], *high[np.isfinite(high)]]
    guessing = float(np.log(results["vocabulary"])) - plain
    if 0 < guessing < max(seen):
        axes.axhline(guessing, color=_FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(
            0.005,
            guessing,
            "as bad as guessing",
            transform=axes.get_yaxis_transform(),
            va="bottom",
            fontsize=10,
            color="#6b7280",
        )
    changed = sizes(results["layers"])
    axes.set_xlim(changed[0] - 0.6, changed[-1] + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.set_ylim(min(-0.02, 1.3 * min(seen)), max(0.2, 1.35 * max(seen)))
    loss_axis(axes, "y")
    plain_axes(axes, "both")
    _label_ends(axes, ends)
    axes.text(
        0.985,
        0.09,
        f"band: the range of {results['seeds']} random orders",
        transform=axes.transAxes,
        ha="right",
        fontsize=11,
        color=_COLOURS["random"],
    )
    entitle(axes, "What changing the middle of the model costs")
    axes.set_xlabel("layers changed in the middle (as many are kept before as after)", fontsize=12)
    axes.set_ylabel("change of loss (nats/token)", fontsize=12)


def _label_ends(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Writes the names of the curves to the right of where they end, apart from each other."""
    scale = axes.yaxis.get_transform().transform
    bottom, top = scale(np.asarray(axes.get_ylim()))
    heights = {
        name: (float(scale(np.asarray([y]))[0]) - bottom) / (top - bottom) for name, (_, y) in ends.items()
    }
    names = sorted(heights, key=heights.__getitem__)
    for name, height in zip(names, _apart([heights[name] for name in names], 0.055), strict=True):
        axes.annotate(
            NAMES[name],
            xy=ends[name],
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=12,
            fontweight="bold",
            color=_COLOURS[name],
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": _COLOURS[name],
                "alpha": 0.5,
                "shrinkB": 6,
                "relpos": (0, 0.5),
            },
        )


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Returns ascending heights moved as little as needed to be `least` apart below the top."""
    moved = list(heights)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + least)
    limit = 0.97
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - least
    return moved


def _draw_pictures(figure: SubFigure) -> None:
    depth = _DRAWN + 4
    entitle(
        figure, f"What the changes are, for {_DRAWN} of {depth} layers:\nlayers upward, steps to the right"
    )
    start, stop = middle(depth, _DRAWN)
    made = interventions(depth, seeds=1)
    for axes, (name, programs) in zip(
        figure.subplots(3, 2, sharex=True, sharey=True).flat, made.items(), strict=True
    ):
        axes.axhspan(start - 0.5, stop + 0.5, color="#eef1f5", zorder=-1)
        draw_program(axes, programs[_DRAWN][0], 6.0)
        axes.set_title(NAMES[name], fontsize=11, loc="left", color=_COLOURS[name], fontweight="bold")
        axes.set_xlim(-0.8, depth - 0.2)
        axes.set_ylim(-0.8, depth - 0.2)
        axes.set_yticks(range(0, depth, 2))
        axes.set_xticks([])
        plain_axes(axes, "y")
        axes.tick_params(axis="y", labelsize=9)


def _draw_layers(axes: Axes, results: dict[str, Any]) -> None:
    change = {key: _change(results[key], results["nll"]) for key in ("delete", "swap")}
    series = [
        Costs("layer deleted", change["delete"], "#2a6fbb", "o"),
        Costs("two neighbours swapped (drawn between them)", change["swap"], "#e07b39", "D", 0.5),
    ]
    draw_costs(axes, "What each layer, and the order of each two, is worth", results["layers"], series)
