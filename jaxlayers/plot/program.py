"""The picture of a program: rows to the right, layers upward."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from jaxlayers.plot.style import GRID
from jaxlayers.program import ATTENTION, CONTINUE, MEAN, MLP, SUM, WHOLE, Program
from jaxlayers.program_text import shorten

_PART_STYLE = {  # marker, colour, name
    WHOLE: ("s", "#2a6fbb", "whole layer"),
    ATTENTION: ("^", "#e07b39", "attention only"),
    MLP: ("v", "#3a9a6a", "MLP only"),
}
_ROW_STYLE: dict[int, tuple[Any, str, str]] = {  # line style, colour, name
    SUM: ("-", "#5b6470", "sum of lanes"),
    MEAN: (":", "#8a4fbf", "mean of lanes"),
    CONTINUE: ("--", "#c2304a", "Newton iteration"),
}
_FUSED_COLOUR = "#f2c14e"


def draw_program(axes: Axes, program: Program, size: float) -> set[int | str]:
    """Draws the marks of a program, `size` points each; returns which kinds of marks and rows there are."""
    rows, depth = program._key, program.depth
    axes.plot([0, depth - 1], [0, depth - 1], color="#c9ced6", linewidth=1.2, zorder=0)
    seen: set[int | str] = set()
    for x, (kind, visits) in enumerate(rows):
        layers = [visit[0] for visit in visits]
        lanes = [
            [visit[0] for visit in visits if visit[3] == lane] for lane in {visit[3] for visit in visits}
        ]
        if len(lanes) > 1 or kind == CONTINUE:
            style, colour, _ = _ROW_STYLE[kind]
            axes.axvspan(x - 0.5, x + 0.5, color=colour, alpha=0.08, linewidth=0, zorder=0)
            axes.plot([x, x], [min(layers), max(layers)], style, color=colour, linewidth=1.4, zorder=1.6)
            seen.add(f"row {kind}")
        for lane in lanes:
            if len(lane) > 1:
                ends = [min(lane), max(lane)]
                band: dict[str, Any] = {
                    "color": _FUSED_COLOUR,
                    "linewidth": 1.5 * size,
                    "alpha": 0.55,
                    "zorder": 1.5,
                }
                axes.plot([x, x], ends, solid_capstyle="round", **band)
                seen.add("fused")
    for part, (marker, colour, _) in _PART_STYLE.items():
        marks = [(x, v[0], v[2]) for x, (_, visits) in enumerate(rows) for v in visits if v[1] == part]
        if marks:
            seen.add(part)
            for hollow in (False, True):  # a scaled visit is hollow
                points = [(x, y) for x, y, scale in marks if (scale != 1) == hollow]
                face = "white" if hollow else colour
                look: dict[str, Any] = {
                    "markersize": size,
                    "color": colour,
                    "markerfacecolor": face,
                    "linestyle": "none",
                }
                axes.plot([x for x, _ in points], [y for _, y in points], marker, zorder=2, **look)
    return seen


def program_figure(program: Program) -> Figure:
    """The program as a picture: rows from left to right, layer ids upward, one mark a visit."""
    rows, depth = program._key, program.depth
    scaled = {visit[2] for _, visits in rows for visit in visits} - {1.0}
    width = min(max(6.0, 2.5 + 0.2 * len(rows)), 16.0)
    height = min(max(3.5, 1.5 + 0.16 * depth), 9.0)
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    pitch = 72 * min((width - 2.0) / max(len(rows), depth), (height - 1.0) / depth)  # points between marks
    size = min(max(2.0, 0.6 * pitch), 8.0)

    seen = draw_program(axes, program, size)
    handles = [Line2D([], [], color="#c9ced6", label="plain model")]
    for part, (marker, colour, name) in _PART_STYLE.items():
        if part in seen:
            handles.append(Line2D([], [], marker=marker, color=colour, linestyle="none", label=name))
    if scaled:
        shown = ", ".join(f"{scale:g}" for scale in sorted(scaled)[:3]) + (", ..." if len(scaled) > 3 else "")
        look: dict[str, Any] = {
            "marker": "s",
            "color": "#5b6470",
            "markerfacecolor": "white",
            "linestyle": "none",
        }
        handles.append(Line2D([], [], label=f"scaled ({shown})", **look))
    for kind, (style, colour, name) in _ROW_STYLE.items():
        if f"row {kind}" in seen:
            handles.append(Line2D([], [], linestyle=style, color=colour, label=name))
    if "fused" in seen:
        handles.append(Line2D([], [], color=_FUSED_COLOUR, linewidth=6, alpha=0.55, label="fused group"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)

    axes.set_title(shorten(str(program), int(8 * width)), fontsize=10, loc="left", family="monospace")
    axes.set_xlabel(f"row ({program.visits} visits, {program.visits / depth:.2f} times the plain model)")
    axes.set_ylabel(f"layer (of {depth})")
    axes.set_xlim(-0.7, max(len(rows), depth) - 0.3)
    axes.set_ylim(-0.7, depth - 0.3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
