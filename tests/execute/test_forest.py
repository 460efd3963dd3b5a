"""Many programs at once against each program alone."""

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlayers.decoder.stack import init, per_layer, unembed
from jaxlayers.execute.forest import Forest
from jaxlayers.execute.rows import forward
from jaxlayers.program import Program

DECODER = init(checkpoints.config(), jax.random.key(3))
DEPTH = DECODER.config.layers
LENGTH = 9
STATE = LENGTH * DECODER.config.embed * 4  # bytes
TEXTS = ["0-3", "0,2-3", "0-3,1-2", "0-1,[2-3]", "[0-2]@2,3", "0-3", "1x3", "0-2,[1-3]/mean", "0a,1m*0.5"]
INPUTS = [[5, 6, 7, 8, 9, 10, 1, 2, 3], [40, 7, 7], [100]]

plain = jax.jit(forward)


def last_logits(decoder, h, details):
    return unembed(decoder, jnp.take_along_axis(h, details[:, None, None], axis=1)[:, 0])


def wanted(tokens, text):
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    program = Program.parse(text, DEPTH).pad(rows=8, lanes=4, slots=12)
    return np.asarray(plain(DECODER, padded, program))[0, len(tokens) - 1]


def jobs_of(forest, inputs, texts):
    numbers = [forest.add(tokens) for tokens in inputs]
    return [
        (number, Program.parse(text, DEPTH), np.int32(len(tokens) - 1))
        for text in texts
        for number, tokens in zip(numbers, inputs, strict=True)
    ]


@pytest.mark.parametrize("places", [1, 2, 3, 5, 17, 1000])
@pytest.mark.parametrize("form", [lambda d: d, per_layer], ids=["stacked", "per layer"])
def test_any_budget_gives_what_each_program_gives_alone(places, form):
    forest = Forest(form(DECODER), LENGTH, last_logits, budget=places * STATE, pack=40)
    assert forest.places == places
    jobs = jobs_of(forest, INPUTS, TEXTS)
    want = [wanted(tokens, text) for text in TEXTS for tokens in INPUTS]
    for _ in range(2):  # the second time some states are still there
        np.testing.assert_allclose(forest.run(jobs), want, atol=1e-4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    programs=st.lists(st.lists(st.integers(0, DEPTH - 1), min_size=1, max_size=8), min_size=1, max_size=12),
    places=st.integers(1, 12),
    pack=st.sampled_from([1, 40]),
)
def test_random_sequences_of_layers(programs, places, pack):
    forest = Forest(per_layer(DECODER), LENGTH, last_logits, budget=places * STATE, pack=pack)
    texts = [",".join(map(str, ids)) for ids in programs]
    found = forest.run(jobs_of(forest, INPUTS[1:2], texts))
    np.testing.assert_allclose(found, [wanted(INPUTS[1], text) for text in texts], atol=1e-4)


def test_a_shared_prefix_runs_once():
    forest = Forest(per_layer(DECODER), LENGTH, last_logits, pack=40)
    forest.run(jobs_of(forest, INPUTS[:1], ["0-3", "0-2", "0-1,3", "0-3,2"]))
    assert forest.visits == len(["0", "1", "2", "3", "3 after 1", "2 after 3"])


def test_states_of_an_earlier_run_are_used_again():
    forest = Forest(per_layer(DECODER), LENGTH, last_logits, pack=40)
    (job,) = jobs_of(forest, INPUTS[:1], ["0-3"])
    first = forest.run([job])
    forest.run([(job[0], Program.parse("0-3,0", DEPTH), job[2])])
    assert forest.visits == 5
    np.testing.assert_array_equal(first, forest.run([job]))
    assert forest.visits == 5


def test_clear_forgets():
    forest = Forest(per_layer(DECODER), LENGTH, last_logits, pack=40)
    before = forest.run(jobs_of(forest, INPUTS, TEXTS))
    visits = forest.visits
    forest.clear()
    np.testing.assert_array_equal(before, forest.run(jobs_of(forest, INPUTS, TEXTS)))
    assert forest.visits == 2 * visits


@pytest.mark.parametrize("tokens", [[], [1] * (LENGTH + 1), [DECODER.config.vocab], [-1]])
def test_inputs_that_do_not_fit_are_refused(tokens):
    with pytest.raises(ValueError, match="input"):
        Forest(DECODER, LENGTH, last_logits).add(tokens)
