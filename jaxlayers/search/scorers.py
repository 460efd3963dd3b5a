"""Scorers of programs for `cola.search`, made of a user's own function."""

from collections.abc import Callable, Sequence

from jaxlayers.generate.text import generate_text
from jaxlayers.program import Program
from jaxlayers.weights.hub import Model


def by_text(
    model: Model, prompt: str, judge: Callable[[str], float], max_tokens: int = 16
) -> Callable[[Sequence[Program]], list[float]]:
    """Returns a scorer that writes greedily after a prompt under each program and judges the text.

    `judge` gets what was written and gives a reward, best between 0 and 1; the texts of some programs are
    written in one batch. Raises as `generate_text` does.
    """

    def scorer(programs: Sequence[Program]) -> list[float]:
        prompts = [prompt] * len(programs)
        written = generate_text(model, prompts, list(programs), max_tokens=max_tokens, block=max_tokens)
        return [float(judge(each.text)) for each in written]

    return scorer
