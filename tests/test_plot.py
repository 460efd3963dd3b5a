"""Pictures hold what was given; how they look is for eyes."""

import io

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection

from jaxlayers.demo import programs
from jaxlayers.plot import demo_figure, program_figure
from jaxlayers.program import Program


def results(depth: int = 6, change: float = 1.0) -> dict:
    rows = [
        {"name": name, "program": str(p), "rows": p.rows, "visits": p.visits, "nll": 4 + change * i / 9}
        for i, (name, p) in enumerate(programs(depth).items())
    ]
    return {
        "model": "tiny",
        "layers": depth,
        "tokens": 8,
        "block": [depth // 3, min(depth // 3 + 4, depth) - 1],
        "nll": 4.0,
        "skip": [4 + change * i for i in range(depth)] if depth > 1 else [],
        "twice": [4 - change * i / 10 for i in range(depth)],
        "programs": rows,
    }


def axes_titled(figure, title: str) -> Axes:
    return next(axes for axes in figure.axes if title in axes.get_title(loc="left"))


@pytest.mark.parametrize("depth", [1, 2, 6, 48])
@pytest.mark.parametrize("change", [1.0, 0.0, -1e-3])
def test_demo_figure_draws_every_number(depth, change):
    given = results(depth, change)
    figure = demo_figure(given)
    figure.savefig(io.BytesIO(), format="png")
    layers = axes_titled(figure, "each layer")
    drawn = {line.get_label(): list(line.get_ydata()) for line in layers.lines}
    assert drawn["layer left out"] == [nll - 4.0 for nll in given["skip"]]
    assert drawn["layer run twice"] == [nll - 4.0 for nll in given["twice"]]
    low, high = layers.get_ylim()
    assert all(low <= y <= high for label, ys in drawn.items() if label.startswith("layer") for y in ys)
    losses = axes_titled(figure, "What programs")
    points = next(c for c in losses.collections if isinstance(c, PathCollection)).get_offsets()
    assert [float(x) for x, _ in points] == pytest.approx([row["nll"] - 4.0 for row in given["programs"]])


def test_program_figure_marks_every_visit():
    program = Program.parse("0-1,[2,3]@2,4a,(5)*0.5", 6)
    axes = program_figure(program).axes[0]
    marks = sum(len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None")
    assert marks == program.visits
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert "Newton iteration" in names
    assert "attention only" in names
    assert any(name.startswith("scaled") for name in names)
