"""What the pictures share."""

from matplotlib.axes import Axes

GRID = "#e6e8eb"
INK = "#1f2937"


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
