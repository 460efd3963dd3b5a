"""Different programs in one batch against each program alone."""

import dataclasses
import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from oracle import BIASED, LAYERS, WINDOWED
from strategies import program_texts

from jaxlayers.decoder.stack import per_layer
from jaxlayers.execute import batch
from jaxlayers.execute.step import bucket
from jaxlayers.generate import decode
from jaxlayers.generate.cache import new_cache
from jaxlayers.program import Program

WINDOWS = dataclasses.replace(WINDOWED, windows=(None, 3, 3, None, 3))  # few kinds of ticks to compile
LENGTHS = np.asarray([9, 5, 7, 9, 1, 3, 8, 2, 6, 4, 9, 1, 7, 5, 2, 8])
B, T, STEPS = len(LENGTHS), 9, 32
TEXTS = ["0-3", "0,2-3", "0-3,1-2", "0-1,[2-3]", "[0-2]@2,3", "0-3", "0-3,1-2", "1x3", "0a,1m,[1+2,3]@2*0.5"]
PROGRAMS = [Program.parse(text, LAYERS) for text in TEXTS]


SIGNS = ("@", "/mean", "/fused", r"\+", r"\da", r"\dm", r"\*", "x")  # two of the programs drawn for each


@functools.cache
def drawn() -> list[Program]:
    """Random programs over the whole grammar, one for each sequence, the same in every run.

    They are small, to be quick, and their scales are near 1: every visit counts, and none drowns the others.
    """
    found = []

    @settings(
        max_examples=800,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program_texts(LAYERS))
    def draw(text):
        program = Program.parse(text, LAYERS)
        sizes = np.abs(program.scale)
        small = 4 <= program.visits <= 16 and program.lanes <= 4
        if small and sizes.min() >= 0.1 and sizes.max() <= 10:
            found.append(program)

    draw()
    random.Random(0).shuffle(found)
    chosen: list[Program] = []
    for sign in SIGNS * 2:
        chosen.append(next(p for p in found if re.search(sign, str(p)) and p not in chosen))
    return chosen


def programs_of(kind: str) -> list[Program]:
    if kind == "all different":
        return drawn()
    return [program if row % 2 else drawn()[0] for row, program in enumerate(drawn())]


def greedy(decoder, logits, cache, program):
    """Returns the logits after a prompt and after each of the greedy tokens that follow it."""

    def step(carry, _):
        logits, cache = carry
        logits, cache = decode.decode_step(decoder, jnp.argmax(logits, axis=-1), cache, program)
        return (logits, cache), logits

    _, more = jax.lax.scan(step, (logits, cache), None, STEPS)
    return jnp.concatenate([logits[None], more])


together = jax.jit(greedy)


@jax.jit
def alone(decoder, tokens, mask, program):
    return greedy(decoder, *decode.prefill(decoder, tokens, program, T + STEPS, mask), program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all different", "half the same"])
@pytest.mark.parametrize(
    ("config", "form", "dtype", "atol"),
    [(WINDOWS, per_layer, "float64", 1e-10), (BIASED, lambda d: d, "float32", 1e-4)],
    ids=["windows per layer", "biased stacked"],
)
def test_each_sequence_runs_its_own_program(config, form, dtype, atol, kind):
    with jax.enable_x64(dtype == "float64"):
        check_each_alone(form, oracle.decoder_of(config, dtype), programs_of(kind), atol)


def check_each_alone(form, decoder, programs, atol):
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab, (B, T)).astype(np.int32)
    mask = np.arange(T) < LENGTHS[:, None]
    shape = [max(getattr(program, size) for program in drawn()) for size in ("rows", "lanes", "slots")]
    rows = zip(tokens, mask, programs, strict=True)
    want = [alone(decoder, row[None], real[None], program.pad(*shape)) for row, real, program in rows]
    want = np.concatenate(want, axis=1)
    assert len(np.unique(want.argmax(axis=-1))) > 10  # no mere repetition

    def found(plan, tokens, mask):
        logits, cache = batch.prefill(form(decoder), tokens, plan, T + STEPS, mask)
        return np.asarray(together(form(decoder), logits, cache, plan))

    plan = batch.schedule(programs)
    left = np.stack([np.roll(row, T - n) for row, n in zip(tokens, LENGTHS, strict=True)])
    for logits in (found(plan, tokens, mask), found(plan, left, mask[:, ::-1])):
        np.testing.assert_allclose(logits, want, rtol=0, atol=atol)
        np.testing.assert_array_equal(logits.argmax(axis=-1), want.argmax(axis=-1))

    # With the rows of two sequences exchanged, these two are wrong, and the others as they were.
    exchanged = plan.active[:, [1, 0, *range(2, B)]]
    off = np.abs(found(batch.Schedule(plan.program, exchanged), tokens, mask) - want).max(axis=(0, 2))
    assert off[:2].min() > 1e-3 and off[2:].max() < atol


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


def test_equal_programs_are_one_program_for_all():
    program = Program.parse("0-3", 4).pad(rows=9)
    plan = batch.schedule([program, Program.parse("0-3", 4)])
    assert plan.program is program
    assert plan.active is None


def test_in_prefill_a_layer_computes_only_who_wants_it():
    plan = batch.schedule([Program.parse("0-3", 4), Program.parse("0,3", 4), Program.parse("0,3", 4)])
    assert str(plan.program) == "0-3"
    assert plan.active.sum(axis=1).tolist() == [3, 1, 1, 3]


@pytest.mark.parametrize(
    ("texts", "ticks"),
    [
        (["0-7", "0-1,0-7", "0-3,2-7"], 12),  # who is ahead waits for who is in a loop
        (["7-0", "7,5-0", "7-3,1-0", "6-0"], 8),
        (["0,1", "2,3"], 4),
    ],
)
def test_programs_that_part_meet_again(texts, ticks):
    plan = batch.schedule([Program.parse(text, 8) for text in texts])
    assert plan.active.any(axis=1).sum() == ticks


def test_few_tables_serve_many_sets_of_programs():
    shapes = set()
    for seed in range(40):
        ways = [np.random.default_rng([seed, row]).integers(0, 8, 9) for row in range(6)]
        plan = batch.schedule([Program.parse(",".join(map(str, way)), 8) for way in ways])
        shapes.add((plan.program.rows, plan.program.lanes, plan.program.slots, plan.active.shape))
        rows = int(plan.active.any(axis=1).sum())
        assert plan.active[:rows].any(axis=1).all()
        assert rows <= plan.program.rows <= 1.25 * rows
    assert len(shapes) <= 3


def test_a_tick_is_compiled_for_its_shape_and_bucket_whatever_the_schedule():
    decoder = oracle.decoder_of(BIASED, "float32")
    tokens = np.ones((4, 7), np.int32)
    known = set()
    before = batch._tick._cache_size()
    few, other, long = (
        [Program.parse(text, LAYERS) for text in texts]
        for texts in (
            ["0-3", "0,2-3", "0-1,[2-3]@2", "0-3"],
            ["1-4", "1-4", "1,3-4", "1-2,[0,3]@2"],
            ["4-0,1x9", "3-0", "[2,0]@2,(3,0)x5", "4-0"],
        )
    )
    for programs in (few, other, long):
        plan = batch.schedule(programs)
        batch.prefill(decoder, tokens, plan)
        row = 0
        for step in plan.program.items:
            table = Program.of([step], LAYERS)
            known.add((table.layer.shape, table.slots, bucket(int(plan.active[row].sum()), 4)))
            row += step.iterations
    assert batch._tick._cache_size() - before == len(known)
    # Sets of programs with one table shape share the decode step.
    step = jax.jit(decode.decode_step)
    for programs in (few, few[::-1], other):
        plan = batch.schedule(programs)
        step(decoder, tokens[:, 0], new_cache(decoder, plan.program, 4, 4), plan)
    assert step._cache_size() == 1


def prefill(batch_size: int, **settings):
    decoder = oracle.decoder_of(BIASED, "float32")
    return batch.prefill(decoder, jnp.zeros((batch_size, 5), int), batch.schedule(PROGRAMS), **settings)


def decode_step(tokens: int, rows: int, plan):
    decoder = oracle.decoder_of(BIASED, "float32")
    cache = new_cache(decoder, batch.as_schedule(plan, LAYERS, 9).program, rows, 4)
    return decode.decode_step(decoder, jnp.zeros(tokens, int), cache, plan)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: batch.schedule([]), "no program"),
        (lambda: batch.schedule([Program.parse("0", 2), Program.parse("0", 3)]), "different depth"),
        (lambda: prefill(3), "9 sequences and the batch has 3"),
        (lambda: prefill(9, length=4), "cannot hold 5"),
        (lambda: decode_step(3, 2, "0-4"), r"shape \[3\] and the cache 2 rows"),
        (lambda: decode_step(1, 9, batch.schedule(PROGRAMS)), r"shape \[1\] and the cache 9 rows"),
        (lambda: decode_step(2, 2, batch.schedule(PROGRAMS)), "9 sequences and the batch has 2"),
        (lambda: batch.as_schedule(batch.schedule(PROGRAMS), 4, 9), "for 5 layers and the decoder has 4"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
