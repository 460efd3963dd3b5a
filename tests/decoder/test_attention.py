"""Attention against a naive reference in numpy, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracle import in_float64

from jaxlayers.decoder import attention
from jaxlayers.decoder.attention import (
    Context,
    KeyValue,
    Places,
    attend_in_blocks,
    causal_attention,
    window_width,
)
from jaxlayers.decoder.splash import splash_attention
from jaxlayers.mesh import make_mesh


def naive(q, sources, positions, window):
    """Attention by loops over rows, heads and queries; zeros where a query sees no key."""
    B, T, H, Q = q.shape
    k, v = (np.concatenate([source[i] for source in sources], axis=2) for i in (0, 1))
    at = np.concatenate([at for _, _, at in sources], axis=1)
    group = H // k.shape[1]
    out = np.zeros_like(q)
    for b in range(B):
        for t in range(T):
            distance = positions[b, t] - at[b]
            seen = (at[b] >= 0) & (distance >= 0) & (distance < (window or 10**9))
            for h in range(H if seen.any() else 0):
                s = k[b, h // group][seen] @ q[b, t, h] / np.sqrt(Q)
                p = np.exp(s - s.max())
                out[b, t, h] = p / p.sum() @ v[b, h // group][seen]
    return out


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def positions_with_padding(T):
    """Three rows of positions: full, padded left, padded right."""
    p = np.full((3, T), -1)
    p[0] = np.arange(T)
    p[1, T // 3 :] = np.arange(T - T // 3)
    p[2, : T - T // 4] = np.arange(T - T // 4)
    return p.astype(np.int32)


def context_at(positions, window=0, past=None, past_positions=None):
    return Context(jnp.asarray(positions), None, None, window, past, past_positions)


def kv_of(k, v):
    return KeyValue(jnp.asarray(k), jnp.asarray(v))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4])
@in_float64
def test_heads_and_windows(kv_heads, window):
    T, positions = 13, positions_with_padding(13)
    q, k, v = random(0, 3, T, 4, 6), random(1, 3, kv_heads, T, 6), random(2, 3, kv_heads, T, 6)
    want = naive(q, [(k, v, positions)], positions, window)
    real = positions >= 0
    for kinds, index in [((window,), 0), ((7, window), 1), ((None, window, 2), jnp.asarray(1))]:
        got = np.asarray(causal_attention(jnp.asarray(q), kv_of(k, v), context_at(positions, index), kinds))
        assert np.isfinite(got).all()
        assert np.abs(got - want)[real].max() < 1e-12


@pytest.mark.parametrize("window", [None, 5])
@in_float64
def test_past_and_new_keys_share_one_softmax(window):
    B, S, T = 3, 11, 5
    old = np.full((B, S), -1, np.int32)
    old[0, :7] = np.arange(7)
    old[1, [1, 2, 5]] = np.arange(3)  # holes of a ragged batch; row 2 has no past at all
    new = (old.max(axis=1, keepdims=True) + 1 + np.arange(T)).astype(np.int32)
    new[1, 3:] = -1
    q = random(0, B, T, 4, 6)
    sources = [
        (random(s, B, 2, n, 6), random(s + 1, B, 2, n, 6), p) for s, n, p in [(1, S, old), (3, T, new)]
    ]
    want = naive(q, sources, new, window)
    ctx = context_at(new, 0, kv_of(*sources[0][:2]), jnp.asarray(old))
    got = np.asarray(causal_attention(jnp.asarray(q), kv_of(*sources[1][:2]), ctx, (window,)))
    assert np.isfinite(got).all()
    assert np.abs(got - want)[new >= 0].max() < 1e-12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_padding_gives_numbers_and_gradients(dtype):
    positions = np.stack([np.full(6, -1), np.arange(6)]).astype(np.int32)
    q, k, v = (jnp.asarray(random(i, 2, *s, 4), dtype) for i, s in enumerate([(6, 2), (1, 6), (1, 6)]))

    def total(q, k, v):
        y = causal_attention(q, KeyValue(k, v), context_at(positions), (None,))
        return jnp.sum(y[1].astype(jnp.float32)), y

    (_, y), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    assert y.dtype == dtype and np.isfinite(np.asarray(y, np.float32)).all()
    for g in grads:
        assert np.isfinite(np.asarray(g, np.float32)).all() and not np.asarray(g[0], np.float32).any()


@pytest.mark.parametrize(
    ("T", "least", "scores"), [(23, 4, 1), (23, 1, 3 * 4 * 23 * 5), (24, 8, 1), (1, 1, 1)]
)
@in_float64
def test_blocks_of_queries_change_nothing(monkeypatch, T, least, scores):
    monkeypatch.setattr(attention, "LEAST_BLOCK", least)
    monkeypatch.setattr(attention, "SCORES", scores)
    positions = positions_with_padding(T)
    q, k, v = random(0, 3, T, 4, 6), random(1, 3, 2, T, 6), random(2, 3, 2, T, 6)
    weights = random(3, 3, T, 4, 6) * (positions >= 0)[..., None, None]

    def blocks(q, k, v):
        here = Places(jnp.asarray(positions))
        return attend_in_blocks(q, here, [(KeyValue(k, v), here)], 6)

    def whole(q, k, v):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "LEAST_BLOCK", T)
            return blocks(q, k, v)

    assert ("while" in jax.jit(blocks).lower(q, k, v).as_text()) == (T > 1)
    want = naive(q, [(k, v, positions)], positions, 6)
    assert np.abs(np.asarray(blocks(q, k, v)) - want)[positions >= 0].max() < 1e-12
    got, expected = (
        jax.grad(lambda *a, f=f: jnp.vdot(weights, f(*a)), (0, 1, 2))(q, k, v) for f in (blocks, whole)
    )
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all() and np.abs(a - b).max() < 1e-12


def test_a_window_index_picks_the_width():
    assert window_width((None,), 0) is None and window_width((4,), 0) == 4
    kinds = (None, 4, 2)
    assert [int(window_width(kinds, jnp.asarray(i))) for i in range(3)] == [2**31 - 1, 4, 2]


# The kernel that TPUs run, interpreted. 200 tokens are one block, 700 are two.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "window", "kv_heads", "width"),
    [(200, None, 2, 8), (200, 37, 1, 128), (200, 1, 2, 8), (700, None, 1, 8), (700, 150, 2, 64)],
)
def test_the_splash_kernel_equals_blocks(T, window, kv_heads, width):
    positions = jnp.asarray(positions_with_padding(T))
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    key_shape = (3, kv_heads, T, width)
    q, k, v = f32(random(0, 3, T, 2, width)), f32(random(1, *key_shape)), f32(random(2, *key_shape))
    real = np.asarray(positions >= 0)
    weights = f32(random(3, 3, T, 2, width) * real[..., None, None])

    def of(function):
        def total(q, k, v):
            y = function(q, k, v)
            return jnp.vdot(weights, y), y

        (_, y), grads = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v)
        return y, grads

    splash = functools.partial(splash_attention, positions=positions, window=window, interpret=True)
    y, grads = of(lambda q, k, v: splash(q, KeyValue(k, v)))
    here = Places(positions)
    blocks = lambda q, k, v: attend_in_blocks(q, here, [(KeyValue(k, v), here)], window)
    want, expected = of(blocks)
    assert np.isfinite(y).all()
    assert np.abs(y - want)[real].max() < 2e-5
    for a, b in zip(grads, expected, strict=True):
        assert np.isfinite(a).all() and np.abs(a - b).max() < 1e-4 * max(1.0, np.abs(b).max())


@pytest.mark.slow
def test_the_splash_kernel_in_bfloat16():
    T, positions = 200, jnp.asarray(positions_with_padding(200))
    q, k, v = (
        jnp.asarray(random(i, 3, *s, 16), jnp.bfloat16) for i, s in enumerate([(T, 4), (2, T), (2, T)])
    )
    y = splash_attention(q, KeyValue(k, v), positions, 50, interpret=True)
    wide = lambda x: np.asarray(x, np.float64)
    at = np.asarray(positions)
    want = naive(wide(q), [(wide(k), wide(v), at)], at, 50)
    assert y.dtype == jnp.bfloat16
    assert np.abs(wide(y) - want)[at >= 0].max() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 4}, {"fsdp": 1, "replica": 2, "tensor": 2, "lane": 2}]
)
def test_the_splash_kernel_on_a_mesh(sizes):
    """Batch and heads spread over chips where they divide (4 rows, 2 key heads), whole where they do not."""
    T, mesh = 130, make_mesh(**sizes)
    positions = np.concatenate([positions_with_padding(T), positions_with_padding(T)[:1]])
    shapes = [(4, T, 4, 8), (4, 2, T, 8), (4, 2, T, 8)]
    q, k, v = (jnp.asarray(random(i, *shape), jnp.float32) for i, shape in enumerate(shapes))
    want = naive(np.asarray(q, np.float64), [(k, v, positions)], positions, 50)

    @jax.jit
    def attend(q, k, v, positions):
        return splash_attention(q, KeyValue(k, v), positions, 50, interpret=True)

    batch = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
    with jax.set_mesh(mesh):
        given = jax.device_put((q, k, v, jnp.asarray(positions)), batch)
        y = attend(*given)
        assert "manual_computation" in attend.lower(*given).as_text()  # under shard_map
    assert np.abs(np.asarray(y) - want)[positions >= 0].max() < 2e-5
