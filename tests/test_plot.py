"""Pictures hold what was given; how they look is for eyes."""

import io
import itertools
import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, QuadMesh

from jaxlayers.demo import programs
from jaxlayers.measure.painters import NAMES, sizes
from jaxlayers.plot import demo_figure, painters_figure, program_figure, search_figure
from jaxlayers.program import Program
from jaxlayers.search.cola import Random, Settings
from jaxlayers.search.found import Found, Score
from jaxlayers.search.report import share
from jaxlayers.search.tasks import Task


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


def searched(id: str, kind: str, condition: str, *programs: tuple[tuple[int, ...], bool]) -> Found:
    return Found(Task(id, "p", "a", kind=kind), condition, [Score(*program, -1.0) for program in programs])


FULL = (0, 1, 2, 3)
FOUND = [
    searched("a", "x", "cola", (FULL, True), ((0, 3), True), ((0, 1), False)),
    searched("b", "y", "cola", (FULL, False), ((0, 1, 1, 1, 1, 2, 3), True)),
    searched("c", "y", "cola", (FULL, False), ((3,), False)),
    searched("d", "x", "cola", (FULL, True), ((0,), False)),
    searched("a", "x", "shuffled", (FULL, False), ((0, 1, 2), True)),
    searched("b", "y", "shuffled", (FULL, False)),
    searched("c", "y", "shuffled", (FULL, False)),
    searched("d", "x", "shuffled", (FULL, False)),
]


def test_search_figure_draws_what_was_found():
    figure = search_figure(FOUND, 4)
    figure.savefig(io.BytesIO(), format="png")

    layers = axes_titled(figure, "each layer")
    drawn = {line.get_label(): list(line.get_ydata()) for line in layers.lines}
    assert drawn["all 9 programs tried"] == pytest.approx([8 / 9, 9 / 9, 5 / 9, 7 / 9])
    assert drawn["shortest right programs of 3 tasks"] == pytest.approx([1, 5 / 3, 2 / 3, 1])

    lengths = axes_titled(figure, "How short")
    drawn = {line.get_label(): list(line.get_ydata()) for line in lengths.lines}
    assert drawn["CoLa"] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.5, 0.75]
    assert drawn["shuffled"] == [0, 0, 0, 0.25, 0.25, 0.25, 0.25, 0.25]
    plain = next(line for line in lengths.lines if line.get_label() == "plain")
    assert (list(plain.get_xdata()), list(plain.get_ydata())) == ([4], [0.5])

    cells = axes_titled(figure, "Shortest right programs: CoLa, 3 of 4 tasks")
    mesh = next(each for each in cells.collections if isinstance(each, QuadMesh))
    assert mesh.get_array().tolist() == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 3, 1, 1]]
    assert [label.get_text() for label in cells.get_yticklabels()] == ["a", "d", "b"]
    assert [text.get_text() for text in cells.texts] == ["2", "4", "7"]

    shares = axes_titled(figure, "what the controls find")
    assert [label.get_text() for label in shares.get_yticklabels()] == [
        "all\n4 tasks",
        "x\n2 tasks",
        "y\n2 tasks",
    ]
    points = [line.get_xdata()[0] for line in shares.lines if line.get_marker() in ("s", "o")]
    assert points == [0.5, 0.75, 0.25, 1, 1, 0.5, 0, 0.5, 0]
    assert list(shares.lines[0].get_xdata()) == list(share([True, False, False, True])[1:3])
    assert [text.get_text() for text in shares.texts][:3] == ["2 of 4", "3 of 4", "1 of 4"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "depth, tasks, names, every",
    [
        (2, 1, ["cola"], 2),
        (80, 20, ["cola"], 5),
        (30, 100, ["cola", "skip", "loop", "random", "shuffled"], 3),
        (12, 3, ["cola", "random"], 10**6),  # none right
        (1, 2, ["shuffled"], 1),
        (4, 40, ["of my own"], 2),
    ],
)
def test_search_figure_has_room_for_few_and_many(depth, tasks, names, every):
    right = itertools.count(1)
    found = []
    for name, task in itertools.product(names, range(tasks)):
        tried = Random(depth, Settings(4), np.random.default_rng(task)).propose(4)
        found.append(
            searched(f"{task}", f"$kind_{task % 9}", name, *((p, next(right) % every == 0) for p in tried))
        )
    figure = search_figure(found[: len(found) - tasks // 2], depth)  # the last condition is interrupted
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    assert len(figure.axes) == 4


def test_search_figure_needs_a_search():
    with pytest.raises(ValueError, match="no search to draw"):
        search_figure([], 4)


@pytest.mark.parametrize("depth", [3, 4, 30])
@pytest.mark.parametrize("change", [2.0, 0.0, -1e-3])
def test_painters_figure_draws_every_number(depth, change):
    def point(size: int, value: float | None) -> dict:
        return {"affected": size, "nll": value, "low": value, "high": value}

    curves = {
        name: [point(size, 4 + change * size * place) for size in sizes(depth)]
        for place, name in enumerate(NAMES)
    }
    curves["parallel"][-1] = point(sizes(depth)[-1], None)
    given = {
        "model": "tiny",
        "layers": depth,
        "tokens": 8,
        "seeds": 2,
        "vocabulary": 99,
        "nll": 4.0,
        "interventions": curves,
        "delete": [{"nll": 4 + change * layer} for layer in range(depth)],
        "swap": [{"nll": None if layer == 1 else 4 - change} for layer in range(depth - 1)],
    }
    figure = painters_figure(given)
    figure.savefig(io.BytesIO(), format="png")
    axes = axes_titled(figure, "changing the middle")
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    for key, name in NAMES.items():
        expected = [math.nan if p["nll"] is None else p["nll"] - 4 for p in curves[key]]
        assert drawn[name] == pytest.approx(expected, nan_ok=True)
    low, high = axes.get_ylim()
    assert all(low <= y <= high for name in NAMES.values() for y in drawn[name] if y == y)
    alone = {
        line.get_label(): list(line.get_ydata()) for line in axes_titled(figure, "order of each two").lines
    }
    assert alone["layer deleted"] == pytest.approx([change * layer for layer in range(depth)])
