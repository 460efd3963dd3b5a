"""The demo's picture."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from jaxlayers.plot.program import draw_program
from jaxlayers.plot.style import INK, Costs, draw_costs, entitle, loss_axis, page, plain_axes
from jaxlayers.program import Program

_COLOURS = {  # of the demo's programs, by a word in the name
    "skip": "#2a6fbb",
    "loop": "#e07b39",
    "plain": "#5b6470",
    "side by side": "#8a4fbf",
    "mean": "#8a4fbf",
    "fused": "#8a4fbf",
    "Newton": "#c2304a",
    "order": "#e07b39",
}


def demo_figure(results: dict[str, Any]) -> Figure:
    """The demo's numbers: the loss by layer, by program with its cost, and what the programs look like."""
    title = (
        f"The depth of a language model is a program   ({results['model']}, {results['layers']} layers, "
        f"{results['tokens']} tokens, plain loss {results['nll']:.3f} nats/token)"
    )
    figure = page(title, 11, w_pad=0.08, h_pad=0.08, wspace=0.02, hspace=0.03)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.25])
    left, right = bottom.subfigures(1, 2, width_ratios=[1.15, 1])
    _draw_layers(top.subplots(), results)
    _draw_costs(left, results)
    _draw_pictures(right, results)
    return figure


def _draw_layers(axes: Axes, results: dict[str, Any]) -> None:
    start, stop = results["block"]
    axes.axvspan(start - 0.5, stop + 0.5, color="#eef1f5", zorder=0)
    axes.text(
        (start + stop) / 2,
        0.97,
        "block of the\nprograms below",
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="top",
        fontsize=10,
        color="#6b7280",
    )
    change = {key: [nll - results["nll"] for nll in results[key]] for key in ("skip", "twice")}
    series = [
        Costs("layer left out", change["skip"], _COLOURS["skip"], "o"),
        Costs("layer run twice", change["twice"], _COLOURS["loop"], "D"),
    ]
    draw_costs(axes, "What each layer is worth", results["layers"], series)


def _draw_costs(figure: SubFigure, results: dict[str, Any]) -> None:
    rows = results["programs"]
    loss, cost = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    places = range(len(rows))
    colours = [_family(row["name"]) for row in rows]
    change = [row["nll"] - results["nll"] for row in rows]
    loss.axvline(0, color="#9aa3af", linewidth=1)
    loss.hlines(places, 0, change, colors=colours, linewidth=3, alpha=0.45)
    loss.scatter(change, places, s=90, c=colours, edgecolors="white", zorder=3)
    loss.set_yticks(places, [row["name"] for row in rows])
    loss.invert_yaxis()
    loss.set_xlim(min(0, *change) * 1.3 - 0.02, max(0.2, *change) * 2.2)
    loss_axis(loss, "x")
    for place, value in zip(places, change, strict=True):
        shown = f"{round(value, 3) + 0.0:+.3f}"
        loss.annotate(
            shown,
            (value, place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=INK,
        )
    entitle(loss, f"What programs for the block {results['block'][0]}-{results['block'][1]} cost")
    loss.set_xlabel("change of loss (nats/token)", fontsize=12)
    plain_axes(loss, "x")
    visits = [row["visits"] for row in rows]
    steps = [row["rows"] for row in rows]
    cost.barh(places, visits, height=0.62, color=colours, alpha=0.35, label="visits")
    cost.scatter(steps, places, marker="|", s=230, linewidths=2.5, c=colours, label="rows", zorder=3)
    cost.set_xlim(0, 1.04 * max(visits))
    cost.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    cost.set_xlabel("visits (bar), rows (mark)", fontsize=12)
    plain_axes(cost, "x")
    cost.tick_params(axis="y", length=0)


def _draw_pictures(figure: SubFigure, results: dict[str, Any]) -> None:
    wanted = ("skip the block", "block twice", "block reversed", "side by side, sum", "fused", "Newton @2")
    rows = [row for row in results["programs"] if row["name"] in wanted]
    entitle(figure, "What they look like: layers upward, rows to the right")
    start, stop = results["block"]
    for axes, row in zip(figure.subplots(2, 3, sharey=True).flat, rows, strict=False):
        draw_program(axes, Program.parse(row["program"], results["layers"]), 8.0)
        axes.set_title(row["name"], fontsize=11, loc="left", color=_family(row["name"]), fontweight="bold")
        axes.set_xlim(start - 3.6, stop + 7.6)
        axes.set_ylim(start - 3.6, stop + 3.6)
        axes.set_yticks(range(start - 3, stop + 4))
        axes.set_xticks([])
        plain_axes(axes, "y")
        axes.tick_params(axis="y", labelsize=9)


def _family(name: str) -> str:
    for start, colour in _COLOURS.items():
        if start in name:
            return colour
    return _COLOURS["order"]
