"""`run` against the oracle: whole forward passes, and split ones through a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import BIASED, LAYERS, WINDOWED, batch, decoder_of, far, in_float64
from strategies import program_texts

from jaxlayers.decoder.stack import (
    abstract,
    context,
    embed,
    layer_fn,
    layer_params,
    per_layer,
    positions_of,
    unembed,
)
from jaxlayers.execute.rows import forward, run
from jaxlayers.generate.cache import Cache, new_cache
from jaxlayers.program import Program, identity, newton, parallel, skip

SHAPES = [(24, 1, 24), (24, 6, 60), (60, 12, 250)]  # rows, lanes, slots: every program in one of few tables
TEXTS = [
    "0-4",
    "4-0",
    "0,2-4",
    "0-1,1x3,2-4",
    "(1-3)x2,4",
    "0,2a,3m,1m,4a",
    "0-2*0.5,(3-4)*-2",
    "0,[1-3],4",
    "0,[1-3]/mean,4,[0-1]/mean",
    "[1-3]/fused,[0+2,4a,3m],1",
    "[0-3]@2,4",
    "0,[1-4]@3x2*0.7",
    "[0+1,2+3]@2,[4m,1a,2]@3",
    "0,[3]@2,[4-0]@4",
]


def table(text: str, shape: tuple[int, int, int] = SHAPES[1]) -> Program:
    return Program.parse(text, LAYERS).pad(*shape)


@jax.jit
def final(decoder, tokens, mask, program):
    """Returns the residual stream after the program."""
    return run(decoder, embed(decoder, tokens), program, positions_of(mask)).h


@functools.partial(jax.jit, static_argnames="fresh")
def extend(decoder, tokens, mask, program, cache, fresh=False):
    """Returns the residual stream of some more tokens, and the cache with them."""
    positions = cache.next_positions(mask)
    result = run(decoder, embed(decoder, tokens), program, positions, cache, fresh=fresh)
    return result.h, result.cache


def split(decoder, tokens, mask, program, chunks, cache=None, fresh=False) -> tuple[jax.Array, Cache]:
    """Returns the residual stream of all tokens, run in chunks through a cache; fresh names the first."""
    cache = new_cache(decoder, program, len(tokens), tokens.shape[1]) if cache is None else cache
    parts, at = [], 0
    for chunk in chunks:
        now = slice(at, at + chunk)
        h, cache = extend(decoder, tokens[:, now], mask[:, now], program, cache, fresh=fresh and at == 0)
        parts.append(h)
        at += chunk
    assert at == tokens.shape[1]
    return jnp.concatenate(parts, axis=1), cache


# --- one forward pass -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WINDOWED, BIASED], ids=["windowed", "biased"])
@settings(max_examples=150, deadline=None)
@given(program_texts(LAYERS))
@in_float64
def test_a_program_means_what_the_oracle_says(config, text):
    program = Program.parse(text, LAYERS)
    needs = (program.rows, program.lanes, program.slots)
    shape = next((shape for shape in SHAPES if all(a <= b for a, b in zip(needs, shape, strict=True))), None)
    assume(shape)
    decoder, (tokens, mask) = decoder_of(config), batch()
    h = final(decoder, tokens, mask, program.pad(*shape))
    assert h.dtype == jnp.float64
    assert far(h, oracle.states(decoder, text, tokens, mask)[-1], mask) < 1e-10


@pytest.mark.parametrize("config", [WINDOWED, BIASED], ids=["windowed", "biased"])
@pytest.mark.parametrize("text", TEXTS)
def test_float32_is_within_1e_4(config, text):
    decoder, (tokens, mask) = decoder_of(config, "float32"), batch()
    h = final(decoder, tokens, mask, table(text))
    assert h.dtype == jnp.float32
    assert far(h, oracle.states(decoder, text, tokens, mask)[-1], mask) < 1e-4


@pytest.mark.parametrize("text", ["0-4", "0,[1-3]@2,4,[0+2]"])
def test_bfloat16_weights_keep_a_float32_residual(text):
    decoder, (tokens, mask) = decoder_of(WINDOWED, "bfloat16"), batch()
    h = final(decoder, tokens, mask, table(text))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), decoder)
    want = oracle.states(wide, text, tokens, mask)[-1]
    assert h.dtype == jnp.float32
    assert 1e-5 < far(h, want, mask) < 0.03  # the lower bound: the weights were used as bfloat16
    cache = new_cache(decoder, table(text), 3, 9)
    assert cache.kv.k.dtype == jnp.bfloat16
    chunked, cache = split(decoder, tokens, mask, table(text), [4, 4, 1], cache)
    assert cache.kv.k.dtype == jnp.bfloat16 and chunked.dtype == jnp.float32
    assert far(chunked, want, mask) < 0.03


@in_float64
def test_the_plain_model_is_a_loop_over_layer_fn():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    positions = positions_of(jnp.asarray(mask))
    h, step = embed(decoder, tokens), jax.jit(layer_fn(decoder))
    for layer, window in enumerate(WINDOWED.windows):
        ctx = context(decoder, positions)._replace(window=WINDOWED.window_kinds.index(window))
        h = step(layer_params(decoder, layer), h, ctx)
    want = unembed(decoder, h)
    plain = forward(decoder, tokens, mask=jnp.asarray(mask))
    assert far(plain, want, mask) < 1e-12
    np.testing.assert_array_equal(plain, forward(decoder, tokens, identity(LAYERS), jnp.asarray(mask)))
    # Padding before or after does not move a row's real tokens.
    for row in range(3):
        alone = tokens[row : row + 1, mask[row]]
        assert far(forward(decoder, alone)[0], plain[row, mask[row]]) < 1e-12


@in_float64
def test_padding_of_the_table_changes_nothing():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    text = "0,[1-3]@2,[2+4,0a]/mean,3m*0.5"
    program = Program.parse(text, LAYERS)
    want = final(decoder, tokens, mask, program)
    for shape in [(program.rows + 3, program.lanes, program.slots), (24, 6, 60)]:
        np.testing.assert_array_equal(final(decoder, tokens, mask, program.pad(*shape)), want)
    # Rows of padding between others; not before a Newton row, which continues the row right above it.
    text = "0,[1-3],[2+4,0a]/mean,3m*0.5"
    program = table(text, (4, 3, 10))
    wide, order = program.pad(rows=8), [4, 0, 5, 1, 6, 2, 3, 7]
    names = ("layer", "part", "scale", "group", "slot", "kind")
    spread = dataclasses.replace(wide, **{name: np.asarray(getattr(wide, name))[order] for name in names})
    np.testing.assert_array_equal(final(decoder, tokens, mask, spread), final(decoder, tokens, mask, program))


@pytest.mark.parametrize("text", TEXTS)
@in_float64
def test_stacked_and_per_layer_agree(text):
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    want = final(decoder, tokens, mask, table(text))
    assert far(final(per_layer(decoder), tokens, mask, table(text)), want) < 1e-12


def test_fifty_programs_of_one_shape_compile_once():
    decoder, (tokens, mask) = decoder_of(WINDOWED, "float32"), batch()
    counted = jax.jit(lambda *args: final.__wrapped__(*args))
    random, seen = np.random.default_rng(0), set()
    while len(seen) < 50:
        lanes = random.integers(0, LAYERS, 3)
        items = [
            *map(str, random.integers(0, LAYERS, 4)),
            f"[{','.join(map(str, lanes))}]@{random.integers(1, 4)}",
        ]
        text = ",".join(items[i] for i in random.permutation(len(items)))
        seen.add(np.asarray(counted(decoder, tokens, mask, table(text))).tobytes())
    assert counted._cache_size() == 1


def test_an_id_outside_the_vocabulary_gives_nan():
    decoder, (tokens, mask) = decoder_of(WINDOWED, "float32"), batch()
    for wrong in (32, 1 << 20, -1, -32):
        bad = tokens.copy()
        bad[0, 4] = wrong
        out = np.asarray(forward(decoder, bad, mask=jnp.asarray(mask)))
        assert np.isnan(out[0, 4:]).all(), wrong
        assert np.isfinite(out[1:][mask[1:]]).all()


def test_padding_may_hold_any_id():
    decoder, (tokens, mask) = decoder_of(WINDOWED, "float32"), batch()
    want = forward(decoder, tokens, mask=jnp.asarray(mask))
    for pad in (-1, 32):
        out = forward(decoder, np.where(mask, tokens, pad), mask=jnp.asarray(mask))
        np.testing.assert_array_equal(np.asarray(out)[mask], np.asarray(want)[mask])


# --- what rows of several lanes mean ----------------------------------------------------------------------


@in_float64
def test_k_newton_iterations_make_the_first_k_layers_exact():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()

    def keys(text):
        """The keys of every visit at real tokens: they show what the visit's layer was given."""
        _, cache = split(decoder, tokens, mask, table(text), [4, 4, 1])
        return [np.asarray(k).swapaxes(1, 2)[mask] for k in cache.kv.k]

    plain, rows = keys("0-4"), keys("[0-4]@5")
    for iteration in range(5):
        for lane in range(LAYERS):
            error = np.abs(rows[iteration * LAYERS + lane] - plain[lane]).max()
            assert error < 1e-10 if lane <= iteration else error > 1e-3, (iteration, lane)
    go = lambda text: final(decoder, tokens, mask, table(text))
    assert far(go("[0-4]@4"), go("0-4"), mask) > 1e-3
    assert far(go("[0-4]@5"), go("0-4"), mask) < 1e-10
    assert far(go("[4,2,0,2]@4"), go("4,2,0,2"), mask) < 1e-10
    assert far(go("[0+1,2+3]@2"), go("[0+1],[2+3]"), mask) < 1e-10


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("[1-3]@1", "[1-3]"),
        ("[3]", "3"),
        ("[3]/mean", "3"),
        ("[3]/fused", "3"),
        ("[3]@2", "3"),  # one lane has converged after one iteration
        ("[2,2]/mean", "2"),
        ("0,2*0,3", "0,3"),
        ("[1-3]*0", "(1-3)*0"),
        ("[1,2]*-0.5", "[2,1]*-0.5"),
        ("[1a,2m]/fused", "1a,2m"),
        ("0-4", "0-1,2a,2m,3-4"),
    ],
)
@in_float64
def test_two_texts_that_mean_the_same(one, same):
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    a, b = (final(decoder, tokens, mask, table(text)) for text in (one, same))
    assert far(a, b, mask) < 1e-12


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1-3]/fused", "[1-3]"),
        ("[1-3]/mean", "[1-3]"),
        ("[1-3]@2", "[1-3]"),
        ("[1-3]@2", "1-3"),
        ("[1,2]@2", "[2,1]@2"),
        ("[1a,2m]", "1a,2m"),
        ("2*0.5", "2"),
    ],
)
@in_float64
def test_two_texts_that_mean_different_things(one, other):
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    a, b = (final(decoder, tokens, mask, table(text)) for text in (one, other))
    assert far(a, b, mask) > 1e-3


@in_float64
def test_builders_run():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    go = lambda program: final(decoder, tokens, mask, program.pad(*SHAPES[1]))
    assert far(go(newton(LAYERS, 1, 3, 3)), go(identity(LAYERS)), mask) < 1e-10
    assert far(go(skip(LAYERS, [0, 1, 3, 4])), go(parallel(LAYERS, 0, 0)), mask) > 1e-3
    only = oracle.Oracle(decoder, positions_of(jnp.asarray(mask)))
    h = embed(decoder, tokens)
    middle = h + only.attend(2, h)
    assert far(go(skip(LAYERS, [0, 1, 3, 4])), middle + only.feed(2, middle), mask) < 1e-12


# --- collecting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0,1x2,4", "0,[1-3]@3,[0+2]/mean,4"])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (3, 0), (2, 2, 1), (), (5, 1, 23)])
@in_float64
def test_collected_rows_are_the_oracles_states(text, rows):
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    states = oracle.states(decoder, text, tokens, mask)[1:]
    program = table(text, SHAPES[0] if "[" not in text else SHAPES[1])
    h = embed(decoder, tokens)
    result = jax.jit(lambda program: run(decoder, h, program, positions_of(jnp.asarray(mask)), collect=rows))(
        program
    )
    assert result.collected.shape == (len(rows), *h.shape) and result.cache is None
    for got, row in zip(result.collected, rows, strict=True):
        assert far(got, states[min(row, len(states) - 1)], mask) < 1e-10
    assert far(result.h, states[-1], mask) < 1e-10


def test_wrong_arguments_are_refused():
    decoder, (tokens, mask) = decoder_of(WINDOWED, "float32"), batch()
    h, positions, program = embed(decoder, tokens), positions_of(jnp.asarray(mask)), identity(LAYERS)
    for rows in [(5,), (-1,), (0, 99)]:
        with pytest.raises(ValueError, match=r"collect=\(.*\) names a row outside 0\.\.4"):
            run(decoder, h, program, positions, collect=rows)
    with pytest.raises(
        ValueError, match="the program is for 4 layers and the decoder has 5; parse it with depth=5"
    ):
        run(decoder, h, identity(4), positions)
    with pytest.raises(ValueError, match="the program writes 6 slots and the cache has 5"):
        run(decoder, h, Program.parse("0-4,4", LAYERS), positions, new_cache(decoder, program, 3, 9))
    for sizes in [(0, 9), (3, 0)]:
        with pytest.raises(ValueError, match="at least one row and one column"):
            new_cache(decoder, program, *sizes)
    for layer in (-1, LAYERS):
        with pytest.raises(IndexError, match="outside"):
            layer_params(decoder, layer)


# --- with a cache -----------------------------------------------------------------------------------------


SPLITS = [[4, 4, 1], [4, 1, 4], [1, 4, 4], [4, 1, 1, 1, 1, 1], [1] * 9]


@pytest.mark.parametrize("config", [WINDOWED, BIASED], ids=["windowed", "biased"])
@pytest.mark.parametrize("text", TEXTS)
@in_float64
def test_every_split_equals_one_forward(config, text):
    decoder, (tokens, mask) = decoder_of(config), batch()
    want = oracle.states(decoder, text, tokens, mask)[-1]
    for chunks in SPLITS:
        h, _ = split(decoder, tokens, mask, table(text), chunks)
        assert np.isfinite(h).all()
        assert far(h, want, mask) < 1e-10, chunks


@settings(max_examples=60, deadline=None)
@given(program_texts(LAYERS), st.sampled_from(SPLITS), st.integers(0, 2**27 - 1))
@in_float64
def test_ragged_splits_equal_one_forward(text, chunks, bits):
    """Rows of any lengths, with holes where a chunk had padding, under any program."""
    program = Program.parse(text, LAYERS)
    assume(all(a <= b for a, b in zip((program.rows, program.lanes, program.slots), SHAPES[1], strict=True)))
    decoder, (tokens, _) = decoder_of(WINDOWED), batch()
    mask = (bits >> np.arange(27) & 1).astype(bool).reshape(3, 9)
    h, cache = split(decoder, tokens, mask, program.pad(*SHAPES[1]), chunks)
    assert np.isfinite(h).all()
    assert far(h, oracle.states(decoder, text, tokens, mask)[-1], mask) < 1e-10
    np.testing.assert_array_equal(cache.positions, positions_of(jnp.asarray(mask)))
    assert cache.length == 9


@in_float64
def test_a_ragged_row_equals_its_tokens_alone():
    """A prompt padded on the right, then decoded: the row's tokens without holes give the same."""
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    mask[2], mask[2, 2:4] = True, False
    text = "0,[1-3]@2,4"
    h, _ = split(decoder, tokens, mask, table(text), [4, 1, 1, 1, 1, 1])
    for row in range(3):
        alone = tokens[row : row + 1, mask[row]]
        want = oracle.states(decoder, text, alone, np.ones(alone.shape, bool))[-1]
        assert far(h[row, mask[row]], want[0]) < 1e-10


@in_float64
def test_fresh_equals_an_empty_cache():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    for text in ("0-4", "0,[1-3]@2,1x2"):
        want, kept = split(decoder, tokens, mask, table(text), [4, 4, 1])
        h, cache = split(decoder, tokens, mask, table(text), [4, 4, 1], fresh=True)
        assert far(h, want, mask) < 1e-12
        real = mask[None, :, None, :, None]
        for a, b in zip(jax.tree.leaves(cache.kv), jax.tree.leaves(kept.kv), strict=True):
            assert np.abs(np.where(real, a - b, 0)).max() < 1e-12


@in_float64
def test_a_longer_cache_and_more_slots_change_nothing():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    program = table("0,[1-3]@2,4")
    want, _ = split(decoder, tokens, mask, program, [4, 4, 1])
    larger = new_cache(decoder, program.pad(slots=70), 3, 13)
    h, cache = split(decoder, tokens, mask, program, [4, 4, 1], larger)
    assert far(h, want, mask) < 1e-12
    assert not np.asarray(cache.kv.k)[60:].any() and not np.asarray(cache.kv.k)[:, :, :, 9:].any()


def test_writing_past_the_end_gives_nan():
    decoder, (tokens, mask) = decoder_of(WINDOWED, "float32"), batch()
    program = identity(LAYERS)
    cache = new_cache(decoder, program, 3, 8)
    h, cache = split(decoder, tokens[:, :8], mask[:, :8], program, [4, 4], cache)
    assert np.isfinite(h).all()
    h, cache = extend(decoder, tokens[:, 8:], mask[:, 8:], program, cache)
    assert np.isnan(h).all()
    h, _ = extend(decoder, tokens[:, 8:], mask[:, 8:], program, cache)  # and it stays so
    assert np.isnan(h).all()


@in_float64
def test_a_cache_rolled_back_is_as_it_was():
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    program = table("0,[1-3]@2,4x2")
    _, cache = extend(decoder, tokens[:, :4], mask[:, :4], program, new_cache(decoder, program, 3, 9))

    def decode(cache, tokens):
        parts = []
        for t in range(4, 9):
            h, cache = extend(decoder, tokens[:, t : t + 1], mask[:, t : t + 1], program, cache)
            parts.append(h)
        return jnp.concatenate(parts, axis=1), cache

    want, _ = decode(cache, tokens)
    other, cache = decode(cache, (tokens + 7) % 32)
    assert far(other, want, mask[:, 4:]) > 1e-3
    again, _ = decode(cache.rolled_back(4), tokens)
    real = mask[:, 4:]
    np.testing.assert_array_equal(np.asarray(again)[real], np.asarray(want)[real])


# --- guards: the rules that must not be broken do break the equality ----------------------------------------


def shared_slots(program: Program, key) -> Program:
    """Returns the program with one slot for all visits of one key(row, lane)."""
    layer, slot = np.asarray(program.layer), np.asarray(program.slot).copy()
    first: dict = {}
    for at in np.argwhere(slot >= 0):
        row, lane = map(int, at)
        slot[row, lane] = first.setdefault(key(row, lane, int(layer[row, lane])), slot[row, lane])
    return dataclasses.replace(program, slot=slot)


def by_layer(row, lane, layer):
    return layer


def worst(program: Program, text: str) -> float:
    decoder, (tokens, mask) = decoder_of(WINDOWED), batch()
    want = oracle.states(decoder, text, tokens, mask)[-1]
    h, _ = split(decoder, tokens, mask, program, [4, 1, 1, 1, 1, 1])
    return far(h, want, mask)


@pytest.mark.parametrize("text", ["0-1,1,2-4", "(1-3)x2", "0,[1,2],[2,1],4", "[0-2]/mean,0-2"])
@in_float64
def test_a_slot_per_layer_is_wrong_where_layers_repeat(text):
    program = table(text)
    assert worst(shared_slots(program, by_layer), text) > 1e-3
    assert worst(program, text) < 1e-10


@pytest.mark.parametrize("text", ["[0-3]@2,4", "[0+1,2,3m,3a]@2,4", "0,[1-4]@3"])
@in_float64
def test_keeping_the_last_iteration_only_is_wrong(text):
    """Every iteration writes the lane's slot, so that the last one stays."""
    program = table(text)
    kind = np.asarray(program.kind)
    start = np.maximum.accumulate(np.where(kind == 2, -1, np.arange(len(kind))))
    assert worst(shared_slots(program, lambda row, lane, layer: (start[row], lane)), text) > 1e-3
    assert worst(program, text) < 1e-10


@pytest.mark.parametrize("text", ["0-4", "4-0", "0,2-4", "0,[1-3],4", "[0+1,2+3]@1,4"])
@in_float64
def test_a_slot_per_layer_is_right_where_none_repeats(text):
    """The guards above fail for the slots they share, not for being rewritten."""
    assert worst(shared_slots(table(text), by_layer), text) < 1e-10
    slot = np.asarray(table(text).slot)
    backward = dataclasses.replace(table(text), slot=np.where(slot < 0, -1, 59 - slot))
    assert worst(backward, text) < 1e-10


@in_float64
def test_an_abstract_decoder_has_the_shapes_of_a_real_one():
    for config in (WINDOWED, BIASED):
        shapes = jax.tree.map(lambda a: (a.shape, a.dtype), abstract(config, jnp.float64))
        assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), decoder_of(config))
