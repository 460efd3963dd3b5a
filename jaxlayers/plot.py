"""Pictures. They are plain `Figure` objects, without pyplot and its global state: `figure.savefig(path)`."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

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
_GRID_COLOUR = "#e6e8eb"
_INK = "#1f2937"
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
    axes.grid(color=_GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def demo_figure(results: dict[str, Any]) -> Figure:
    """The demo's numbers: the loss by layer, by program with its cost, and what the programs look like."""
    figure = Figure(figsize=(16, 11), dpi=110, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.02, hspace=0.03)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.25])
    left, right = bottom.subfigures(1, 2, width_ratios=[1.15, 1])
    figure.suptitle(
        f"The depth of a language model is a program   ({results['model']}, {results['layers']} layers, "
        f"{results['tokens']} tokens, plain loss {results['nll']:.3f} nats/token)",
        fontsize=15,
        fontweight="bold",
        color=_INK,
    )
    _draw_layers(top.subplots(), results)
    _draw_costs(left, results)
    _draw_pictures(right, results)
    return figure


def _plain(axes: Axes, grid: str) -> None:
    """Takes away what does not carry numbers."""
    axes.grid(axis=grid, color=_GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa3af")
    axes.tick_params(colors=_INK, labelsize=11)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


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
    axes.axhline(0, color="#9aa3af", linewidth=1)
    series = (("skip", "left out", _COLOURS["skip"], "o"), ("twice", "run twice", _COLOURS["loop"], "D"))
    for key, name, colour, marker in series:
        change = [nll - results["nll"] for nll in results[key]]
        axes.plot(
            range(len(change)),
            change,
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.8,
            markeredgecolor="white",
            label=f"layer {name}",
        )
    axes.legend(frameon=False, fontsize=12, loc="upper right")
    axes.set_title("What each layer is worth", loc="left", fontsize=13, fontweight="bold", color=_INK)
    axes.set_xlabel("layer", fontsize=12)
    axes.set_ylabel("change of loss (nats/token)", fontsize=12)
    axes.set_xlim(-0.7, results["layers"] - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    change = [nll - results["nll"] for key in ("skip", "twice") for nll in results[key]]
    axes.set_ylim(min(-0.02, 1.3 * min(change)), max(0.2, 1.5 * max(change)))
    _loss_axis(axes, "y")
    _plain(axes, "both")


def _loss_axis(axes: Axes, which: str) -> None:
    """Linear within 0.1 nats, logarithmic beyond; changes may be negative."""
    getattr(axes, f"set_{which}scale")("symlog", linthresh=0.1, linscale=0.7)
    axis = getattr(axes, f"{which}axis")
    ticks = [0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    low, high = axis.get_view_interval()
    ticks = sorted({sign * tick for tick in ticks for sign in (1, -1)})
    axis.set_ticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")


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
    _loss_axis(loss, "x")
    for place, value in zip(places, change, strict=True):
        shown = f"{round(value, 3) + 0.0:+.3f}"
        loss.annotate(
            shown,
            (value, place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=_INK,
        )
    loss.set_title(
        f"What programs for the block {results['block'][0]}-{results['block'][1]} cost",
        loc="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    loss.set_xlabel("change of loss (nats/token)", fontsize=12)
    _plain(loss, "x")
    visits = [row["visits"] for row in rows]
    steps = [row["rows"] for row in rows]
    cost.barh(places, visits, height=0.62, color=colours, alpha=0.35, label="visits")
    cost.scatter(steps, places, marker="|", s=230, linewidths=2.5, c=colours, label="rows", zorder=3)
    cost.set_xlim(0, 1.04 * max(visits))
    cost.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    cost.set_xlabel("visits (bar), rows (mark)", fontsize=12)
    _plain(cost, "x")
    cost.tick_params(axis="y", length=0)


def _draw_pictures(figure: SubFigure, results: dict[str, Any]) -> None:
    wanted = ("skip the block", "block twice", "block reversed", "side by side, sum", "fused", "Newton @2")
    rows = [row for row in results["programs"] if row["name"] in wanted]
    figure.suptitle(
        "What they look like: layers upward, rows to the right",
        x=0.02,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    start, stop = results["block"]
    for axes, row in zip(figure.subplots(2, 3, sharey=True).flat, rows, strict=False):
        draw_program(axes, Program.parse(row["program"], results["layers"]), 8.0)
        axes.set_title(row["name"], fontsize=11, loc="left", color=_family(row["name"]), fontweight="bold")
        axes.set_xlim(start - 3.6, stop + 7.6)
        axes.set_ylim(start - 3.6, stop + 3.6)
        axes.set_yticks(range(start - 3, stop + 4))
        axes.set_xticks([])
        _plain(axes, "y")
        axes.tick_params(axis="y", labelsize=9)


def _family(name: str) -> str:
    for start, colour in _COLOURS.items():
        if start in name:
            return colour
    return _COLOURS["order"]
