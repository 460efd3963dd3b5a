"""What the pictures share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

GRID = "#e6e8eb"
INK = "#1f2937"


TITLE: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": INK}  # of a panel


def page(title: str, height: float, **room: float) -> Figure:
    """Returns an empty figure with a title; `room` are the paddings of matplotlib's constrained layout."""
    figure = Figure(figsize=(16, height), dpi=110, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(**room)
    figure.suptitle(title, fontsize=15, fontweight="bold", color=INK)
    return figure


def entitle(panel: Axes | SubFigure, title: str) -> None:
    """Writes the title of a panel, or of a part of the figure with several, at its left."""
    if isinstance(panel, Axes):
        panel.set_title(title, loc="left", **TITLE)
    else:
        panel.suptitle(title, x=0.02, ha="left", **TITLE)


def plain_axes(axes: Axes, grid: str) -> None:
    """Takes away what does not carry numbers."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa3af")
    axes.tick_params(colors=INK, labelsize=11)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def loss_axis(axes: Axes, which: str) -> None:
    """Linear within 0.1 nats, logarithmic beyond; changes may be negative."""
    getattr(axes, f"set_{which}scale")("symlog", linthresh=0.1, linscale=0.7)
    axis = getattr(axes, f"{which}axis")
    ticks = [0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
    low, high = axis.get_view_interval()
    ticks = sorted({sign * tick for tick in ticks for sign in (1, -1)})
    axis.set_ticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")


class Costs(NamedTuple):
    """A curve of `draw_costs`: what something costs at each layer."""

    label: str
    costs: Sequence[float]  # nats/token; NaN leaves a gap
    colour: str
    marker: str
    shift: float = 0.0  # to the right, in layers


def draw_costs(axes: Axes, title: str, layers: int, series: Sequence[Costs]) -> None:
    """Draws changes of loss over the layers of a model."""
    axes.axhline(0, color="#9aa3af", linewidth=1)
    seen = [0.0]
    for label, costs, colour, marker, shift in series:
        y = np.asarray(costs, float)
        axes.plot(
            np.arange(len(y)) + shift,
            y,
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.8,
            markeredgecolor="white",
            label=label,
        )
        seen += [*y[np.isfinite(y)]]
    axes.legend(frameon=False, fontsize=12, loc="upper right")
    entitle(axes, title)
    axes.set_xlabel("layer", fontsize=12)
    axes.set_ylabel("change of loss (nats/token)", fontsize=12)
    axes.set_xlim(-0.7, layers - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.set_ylim(min(-0.02, 1.3 * min(seen)), max(0.2, 1.5 * max(seen)))
    loss_axis(axes, "y")
    plain_axes(axes, "both")
