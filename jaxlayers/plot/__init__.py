"""Pictures. They are plain `Figure` objects, without pyplot and its global state: `figure.savefig(path)`."""

from jaxlayers.plot.demo import demo_figure
from jaxlayers.plot.painters import painters_figure
from jaxlayers.plot.program import draw_program, program_figure
from jaxlayers.plot.search import search_figure

__all__ = ["demo_figure", "draw_program", "painters_figure", "program_figure", "search_figure"]
