"""Functions of a user as scorers."""

import checkpoints

from jaxlayers.generate.text import generate_text
from jaxlayers.search.cola import Settings, search
from jaxlayers.search.scorers import by_text

MODEL = checkpoints.model(5)


def test_a_text_written_under_each_program_is_judged():
    judge = lambda text: len(text) / 100
    found = list(search(4, by_text(MODEL, "the and", judge, 5), Settings(simulations=6), leaves=3))
    for program, reward in found:
        alone = generate_text(MODEL, "the and", program, max_tokens=5)[0]
        assert reward == judge(alone.text), str(program)
