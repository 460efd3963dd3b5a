"""Several continuations of one text in one sequence, and sequences without padding, against each alone."""

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlayers.decoder.stack import embed, init
from jaxlayers.execute.forest import Forest
from jaxlayers.execute.rows import run
from jaxlayers.execute.step import bucket
from jaxlayers.generate.cache import new_cache
from jaxlayers.program import Program

DECODERS = {
    "full": init(checkpoints.config(), jax.random.key(0)),
    "windows": init(checkpoints.config(windows=(None, 3, 3, None)), jax.random.key(1)),
}
TEXT, ANSWERS = [5, 6, 7, 8], [[9], [1, 2, 3], [4, 9]]
PROGRAM = Program.parse("0-2,1-3", 4)

runs = jax.jit(run)


def states(decoder, tokens):
    """What each token's state is when a sequence runs by itself."""
    padded = np.zeros((1, 9), np.int32)
    padded[0, : len(tokens)] = tokens
    positions = np.where(np.arange(9) < len(tokens), np.arange(9), -1)[None]
    return np.asarray(runs(decoder, embed(decoder, padded), PROGRAM, positions).h)[0, : len(tokens)]


def branched():
    tokens, positions, branch = list(TEXT), list(range(4)), [0] * 4
    for number, answer in enumerate(ANSWERS, 1):
        tokens += answer
        positions += range(4, 4 + len(answer))
        branch += [number] * len(answer)
    return tokens, positions, branch


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_branches_see_the_text_and_themselves(decoder):
    tokens, positions, branch = (
        np.asarray([row + [fill] * 2], np.int32) for row, fill in zip(branched(), (0, -1, 0), strict=True)
    )
    h = np.asarray(runs(decoder, embed(decoder, tokens), PROGRAM, positions, branch=branch).h)[0]
    start = 4
    for answer in ANSWERS:
        want = states(decoder, TEXT + answer)
        np.testing.assert_allclose(h[:4], want[:4], atol=1e-4)
        np.testing.assert_allclose(h[start : start + len(answer)], want[4:], atol=1e-4)
        start += len(answer)
    mixed = np.asarray(runs(decoder, embed(decoder, tokens), PROGRAM, positions).h)[0]
    assert np.abs(mixed - h)[5:10].max() > 1e-3  # without branches the answers see each other


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_packed_sequences_see_their_own_tokens(decoder):
    sequences = [TEXT, [3], [1, 2, 3, 4, 5, 6], [9, 9]]
    total, longest = sum(map(len, sequences)), max(map(len, sequences))
    order = np.random.default_rng(0).permutation(total)  # the tokens may stand anywhere in the row
    packed = np.full((5, longest), total, np.int32)  # and a sequence may be empty
    tokens, positions, start = np.zeros((1, total), np.int32), np.zeros((1, total), np.int32), 0
    for row, sequence in enumerate(sequences):
        at = order[start : start + len(sequence)]
        packed[row, : len(sequence)] = at
        tokens[0, at], positions[0, at] = sequence, range(len(sequence))
        start += len(sequence)
    h = np.asarray(runs(decoder, embed(decoder, tokens), PROGRAM, positions, packed=packed).h)[0]
    for row, sequence in enumerate(sequences):
        np.testing.assert_allclose(h[packed[row, : len(sequence)]], states(decoder, sequence), atol=1e-4)


def test_a_forest_of_branches_equals_each_continuation_alone():
    decoder = DECODERS["windows"]
    forest = Forest(decoder, 12, lambda decoder, h, details: h, pack=24)
    tokens, positions, branch = branched()
    inputs = [forest.add(tokens, positions, branch), forest.add(TEXT + ANSWERS[1])]
    both, plain = forest.run([(number, PROGRAM, np.int32(0)) for number in inputs])
    np.testing.assert_allclose(both[5:8], plain[4:7], atol=1e-4)
    np.testing.assert_allclose(plain[:7], states(decoder, TEXT + ANSWERS[1]), atol=1e-4)


def test_calls_have_few_sizes_that_hold_what_they_must():
    sizes = {n: bucket(n, 512, steps=2) for n in range(1, 513)}
    assert all(size >= n for n, size in sizes.items())
    assert all(size <= max(1.5 * n, n + 1) for n, size in sizes.items())
    assert len(set(sizes.values())) <= 19


@pytest.mark.parametrize("more", [{"branch": jnp.zeros((1, 2), int)}, {"packed": jnp.zeros((1, 2), int)}])
def test_they_have_no_place_in_a_cache(more):
    decoder = DECODERS["full"]
    cache = new_cache(decoder, PROGRAM, 1, 4)
    with pytest.raises(ValueError, match="no place in a cache"):
        run(decoder, embed(decoder, jnp.zeros((1, 2), int)), PROGRAM, jnp.zeros((1, 2), int), cache, **more)


def test_packed_sequences_stand_in_one_row():
    with pytest.raises(ValueError, match="one row, not in 2"):
        h, positions = jnp.zeros((2, 3, DECODERS["full"].config.embed)), jnp.zeros((2, 3), int)
        run(DECODERS["full"], h, PROGRAM, positions, packed=jnp.zeros((1, 3), int))
