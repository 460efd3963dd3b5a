"""Gradients through `run` against those through the oracle's loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import BIASED, LAYERS, WINDOWED, batch, decoder_of, in_float64

from jaxlayers.decoder.stack import embed, per_layer, positions_of
from jaxlayers.execute.rows import run
from jaxlayers.generate.cache import new_cache
from jaxlayers.program import Program

ONE_LANE, LANES = (12, 1, 12), (8, 5, 30)
TEXTS = [
    "0-4",
    "0,2x3,4*0.5",
    "0,1a,3m,2",
    "0,[1-3],4",
    "0,[1,3,1]/mean",
    "[0+1,2]/fused,4",
    "[0-3]@3,1",
    "[0+2,3a,4m]@2*0.7,1",
]


# Compiling takes nearly all the time of these tests.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def table(text: str) -> Program:
    return Program.parse(text, LAYERS).pad(*(LANES if "[" in text else ONE_LANE))


def inputs():
    tokens, mask = batch()
    weights = np.random.default_rng(3).normal(size=(*tokens.shape, 16)) * mask[..., None]
    return tokens, jnp.asarray(mask), jnp.asarray(weights)


def loss(decoder, program, tokens, mask, weights):
    return jnp.vdot(weights, run(decoder, embed(decoder, tokens), program, positions_of(mask)).h)


def reference(decoder, text, tokens, mask, weights):
    return jnp.vdot(weights, oracle.states(decoder, text, tokens, mask)[-1])


gradient = quick_jit(jax.grad(loss))


@functools.lru_cache
def want(config, text):
    return jax.grad(reference)(decoder_of(config), text, *inputs())


def assert_equal_trees(a, b, tolerance=1e-10):
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(b))
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert float(jnp.abs(x - y).max()) < tolerance * size, jax.tree_util.keystr(path)


@pytest.mark.parametrize(("config", "text"), [(WINDOWED, text) for text in TEXTS] + [(BIASED, TEXTS[-1])])
@in_float64
def test_gradients_equal_the_oracles(config, text):
    decoder = decoder_of(config)
    got = gradient(decoder, table(text), *inputs())
    assert_equal_trees(got, want(config, text))
    visited = set(table(text).layers)
    for path, leaf in jax.tree.leaves_with_path(got.layers):
        for layer in range(LAYERS):
            if layer not in visited:
                assert not np.asarray(leaf[layer]).any(), (layer, jax.tree_util.keystr(path))
    branches = {"attention": "a", "mlp": "m"}
    for layer in visited:
        for branch, letter in branches.items():
            moved = any(np.asarray(leaf[layer]).any() for leaf in jax.tree.leaves(got.layers[branch]))
            other = "m" if letter == "a" else "a"
            assert moved == (f"{layer}{other}" not in text), (layer, branch)


@in_float64
def test_a_table_with_lanes_has_the_same_gradient():
    decoder, text = decoder_of(WINDOWED), "0,2x3,4*0.5"
    got = gradient(decoder, Program.parse(text, LAYERS).pad(*LANES), *inputs())
    assert_equal_trees(got, want(WINDOWED, text))


@in_float64
def test_gradients_of_the_per_layer_form():
    decoder, text = decoder_of(WINDOWED), "0,[1-3]@2,1"
    got = quick_jit(jax.grad(loss))(per_layer(decoder), table(text), *inputs())
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *got.layers)
    assert_equal_trees(stacked, want(WINDOWED, text).layers)


@in_float64
def test_gradients_of_collected_rows():
    decoder, text, (tokens, mask, weights) = decoder_of(WINDOWED), "0,[1-3]@2,4", inputs()

    def kept(decoder, program):
        result = run(decoder, embed(decoder, tokens), program, positions_of(mask), collect=(2, 0))
        return jnp.vdot(weights, result.collected[0]) + jnp.vdot(2 * weights, result.collected[1])

    def unrolled(decoder):
        states = oracle.states(decoder, text, tokens, mask)[1:]
        return jnp.vdot(weights, states[2]) + jnp.vdot(2 * weights, states[0])

    got = quick_jit(jax.grad(kept))(decoder, table(text))
    assert_equal_trees(got, jax.grad(unrolled)(decoder))
    assert not any(
        np.asarray(leaf[4]).any() for leaf in jax.tree.leaves(got.layers)
    )  # behind the last kept row


@in_float64
def test_gradients_through_a_cache():
    """A loss over two chunks reaches the first through the keys and values that the second reads."""
    decoder, text, (tokens, mask, weights) = decoder_of(WINDOWED), "0,[1-3]@2,4", inputs()

    def chunked(decoder, program):
        cache, total = new_cache(decoder, program, 3, 10), 0.0
        for now in (slice(0, 5), slice(5, 9)):
            positions = cache.next_positions(mask[:, now])
            h, cache, _ = run(decoder, embed(decoder, tokens[:, now]), program, positions, cache)
            total += jnp.vdot(weights[:, now], h)
        return total

    assert_equal_trees(quick_jit(jax.grad(chunked))(decoder, table(text)), want(WINDOWED, text))


@in_float64
def test_gradients_of_scales():
    decoder, program, given = decoder_of(WINDOWED), table("0*0.5,[1-3]@2,4*2"), inputs()

    def of_scale(scale):
        return loss(decoder, dataclasses.replace(program, scale=scale), *given)

    # float32 as the table keeps it would hide the slope in rounding.
    scale = jnp.asarray(program.scale, jnp.float64)
    got, value = quick_jit(jax.grad(of_scale))(scale), quick_jit(of_scale)
    for at in np.argwhere(np.asarray(program.layer) >= 0):
        step = jnp.zeros_like(scale).at[tuple(at)].set(1e-5)
        slope = (value(scale + step) - value(scale - step)) / 2e-5
        assert abs(float(got[tuple(at)] - slope)) < 1e-6 * max(1.0, abs(float(slope))), at
    assert not np.asarray(got)[np.asarray(program.layer) < 0].any()


@in_float64
def test_forward_and_mixed_derivatives():
    decoder, text, given = decoder_of(WINDOWED), "0,[1-3]@2,1m", inputs()
    random = np.random.default_rng(5)
    direction = jax.tree.map(lambda a: jnp.asarray(random.normal(size=a.shape)), decoder)

    def slope(function):
        return lambda decoder: jax.jvp(function, (decoder,), (direction,))[1]

    plain = slope(lambda decoder: reference(decoder, text, *given))
    ours = slope(lambda decoder: loss(decoder, table(text), *given))
    got, expected = quick_jit(ours)(decoder), plain(decoder)
    assert abs(float(got - expected)) < 1e-9 * abs(float(expected))
    inner = sum(
        float(jnp.vdot(a, b))
        for a, b in zip(jax.tree.leaves(want(WINDOWED, text)), jax.tree.leaves(direction), strict=True)
    )
    assert abs(float(got) - inner) < 1e-9 * abs(inner)
    assert_equal_trees(quick_jit(jax.grad(ours))(decoder), jax.grad(plain)(decoder), 1e-9)


def test_ten_programs_of_one_shape_compile_one_gradient():
    tokens, mask, weights = inputs()
    given = (tokens, mask, weights.astype(jnp.float32))
    counted, seen = quick_jit(jax.value_and_grad(loss)), set()
    for k in range(10):
        text = f"{k % 5},[0,{k % 3},4]@{1 + k % 3},{k // 2}*0.5"
        value, grads = counted(decoder_of(WINDOWED, "float32"), table(text), *given)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        seen.add(float(value))
    assert len(seen) == 10 and counted._cache_size() == 1


@in_float64
def test_bfloat16_gradients_are_near_float64s():
    (tokens, mask, weights), text = inputs(), "0,[1-3]@2,4"
    narrow = decoder_of(WINDOWED, "bfloat16")
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), narrow)
    got = gradient(narrow, table(text), tokens, mask, weights.astype(jnp.float32))
    expected = jax.grad(reference)(wide, text, tokens, mask, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        error = jnp.linalg.norm(a.astype(b.dtype) - b)
        assert float(error) <= 0.1 * float(jnp.linalg.norm(b)), jax.tree_util.keystr(path)
