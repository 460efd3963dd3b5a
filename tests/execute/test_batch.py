"""Different programs in one batch against each program alone."""

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlayers.decoder.stack import init, per_layer
from jaxlayers.execute import batch
from jaxlayers.generate import decode
from jaxlayers.program import Program

DECODER = init(checkpoints.config(), jax.random.key(3))
DEPTH = DECODER.config.layers
TEXTS = ["0-3", "0,2-3", "0-3,1-2", "0-1,[2-3]", "[0-2]@2,3", "0-3", "0-3,1-2", "1x3", "0a,1m,[1+2,3]@2*0.5"]
PROGRAMS = [Program.parse(text, DEPTH) for text in TEXTS]
LENGTHS = [9, 5, 7, 9, 1, 3, 8, 2, 6]
STEPS = 4

step_alone = jax.jit(decode.decode_step)
step_batch = jax.jit(batch.decode_step)


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    vocab = DECODER.config.vocab
    return rng.integers(0, vocab, (len(TEXTS), 9)), rng.integers(0, vocab, (STEPS, len(TEXTS)))


@pytest.fixture(scope="module")
def alone(tokens):
    """The logits after the prompt and after each of some tokens, by sequence."""
    prompts, more = tokens
    found = []
    for row, program in enumerate(PROGRAMS):
        padded = program.pad(rows=8, lanes=4, slots=12)
        mask = np.arange(9)[None] < LENGTHS[row]
        logits, cache = jax.jit(decode.prefill, static_argnames="length")(
            DECODER, prompts[row : row + 1], padded, length=16, mask=mask
        )
        steps = [logits[0]]
        for token in more:
            logits, cache = step_alone(DECODER, token[row : row + 1], cache, padded)
            steps.append(logits[0])
        found.append(np.stack(steps))
    return np.stack(found, axis=1)


@pytest.mark.parametrize("form", [lambda d: d, per_layer], ids=["stacked", "per layer"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_sequence_runs_its_own_program(tokens, alone, form, side):
    prompts, more = tokens
    mask = np.arange(9)[None] < np.asarray(LENGTHS)[:, None]
    if side == "left":
        prompts = np.stack([np.roll(row, 9 - n) for row, n in zip(prompts, LENGTHS, strict=True)])
        mask = mask[:, ::-1]
    decoder = form(DECODER)
    plan = batch.schedule(PROGRAMS)
    logits, cache = batch.prefill(decoder, jnp.asarray(prompts), plan, 16, mask)
    found = [logits]
    for token in more:
        logits, cache = step_batch(decoder, token, cache, plan)
        found.append(logits)
    np.testing.assert_allclose(np.stack(found), alone, atol=1e-4)


def test_a_schedule_contains_every_program_and_no_more_than_it_must():
    plan = batch.schedule(PROGRAMS)
    steps = plan.program.items
    for sequence, program in enumerate(PROGRAMS):
        rows = np.flatnonzero(plan.active[:, sequence])
        own, row = [], 0
        for step in steps:
            if row in rows:
                own.append(step)
            row += step.iterations
        assert tuple(own) == program.items
    assert sum(s.iterations for s in steps) <= sum(p.rows for p in set(PROGRAMS))


def test_equal_programs_share_every_tick():
    plan = batch.schedule([Program.parse("0-3", 4)] * 5)
    assert plan.program == Program.parse("0-3", 4)
    assert plan.active.all()


def test_in_prefill_a_layer_computes_only_who_wants_it():
    plan = batch.schedule([Program.parse("0-3", 4), Program.parse("0,3", 4), Program.parse("0,3", 4)])
    assert str(plan.program) == "0-3"
    assert plan.active.sum(axis=1).tolist() == [3, 1, 1, 3]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: batch.schedule([]), "no program"),
        (lambda: batch.schedule([Program.parse("0", 2), Program.parse("0", 3)]), "different depth"),
        (
            lambda: batch.prefill(DECODER, jnp.zeros((3, 2), int), batch.schedule(PROGRAMS)),
            "9 sequences and the batch has 3",
        ),
        (
            lambda: batch.prefill(DECODER, jnp.zeros((9, 5), int), batch.schedule(PROGRAMS), length=4),
            "cannot hold 5",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
