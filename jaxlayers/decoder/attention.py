"""Causal self-attention with grouped key-value heads, memory-linear in the length."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.linear import Linear
from jaxlayers.decoder.norm import RmsNorm, at_least_float32
from jaxlayers.decoder.rope import rotate

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # not -inf: a row that sees no key must give no NaN
SCORES = 1 << 24  # scores held at once, in elements: bounds memory whatever the length
LEAST_BLOCK = 128  # queries worked on together, at least


class KeyValue(NamedTuple):
    """Keys (normed and rotated) and values of one visit."""

    k: Float[Array, "B K S Q"]
    v: Float[Array, "B K S Q"]


class Context(NamedTuple):
    """What attention needs to know beside the residual stream."""

    positions: Int[Array, "B T"]  # of the queries; -1 marks padding
    cos: Float[Array, "B T P"]
    sin: Float[Array, "B T P"]
    window: Int[Array, ""] | int = 0  # index into config.window_kinds; differs by layer
    past: KeyValue | None = None  # what this visit wrote for earlier tokens
    past_positions: Int[Array, "B S"] | None = None  # -1 where nothing is written
    branch: Int[Array, "B T"] | None = None  # 0 is seen by all later tokens, any other by its own alone
    rows: Int[Array, "N S"] | None = None  # where in the only row B = 1 each token of N sequences stands


class Places(NamedTuple):
    """Where tokens stand: several continuations of one text stand side by side as branches."""

    position: Int[Array, "B S"]  # -1 marks padding
    branch: Int[Array, "B S"] | None = None  # None: no branches


class Source(NamedTuple):
    """Keys and values to attend to, and which query may see which key."""

    kv: KeyValue
    visible: Bool[Array, "B T S"]


class Attention(nnx.Module):
    """The attention branch without its input norm."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, H, K, Q = config.embed, config.heads, config.kv_heads, config.head_width
        bias = config.qkv_bias
        self.q = Linear(D, H * Q, ("embed", "heads"), bias=bias, rngs=rngs)
        self.k = Linear(D, K * Q, ("embed", "kv"), bias=bias, rngs=rngs)
        self.v = Linear(D, K * Q, ("embed", "kv"), bias=bias, rngs=rngs)
        self.out = Linear(H * Q, D, ("heads", "embed"), bias=config.out_bias, rngs=rngs)
        self.q_norm = RmsNorm(Q, config.norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(Q, config.norm_eps) if config.qk_norm else None
        self.shape = (H, K, Q)
        self.window_kinds = config.window_kinds

    def __call__(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Returns the branch, in at least float32, and the keys and values of the T tokens of x."""
        B, T = x.shape[:2]
        H, K, Q = self.shape
        # Without the pin the TPU compiler turns the heads outward inside the projection, and to that end
        # copies the weights of every layer into another layout.
        q = row_major(self.q(x)).reshape(B, T, H, Q)
        k = row_major(self.k(x)).reshape(B, T, K, Q)
        v = row_major(self.v(x)).reshape(B, T, K, Q)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
        new = KeyValue(k.swapaxes(1, 2), v.swapaxes(1, 2))
        attend = causal_attention if ctx.rows is None else packed_attention
        y = attend(q, new, ctx, self.window_kinds)
        return self.out(y.reshape(B, T, H * Q), out=jnp.float32), new


def row_major(x: Array) -> Array:
    """Returns x, pinned to the layout with the last axis minor: where layout choices shall not travel on."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def causal_attention(
    q: Float[Array, "B T H Q"], new: KeyValue, ctx: Context, window_kinds: tuple[int | None, ...]
) -> Float[Array, "B T H Q"]:
    """Returns softmax attention of T tokens over the past and themselves.

    On TPU a call without a past uses jax's splash attention; everything else is blockwise XLA.
    """

    def blockwise(q, new):
        here = Places(ctx.positions, ctx.branch)
        sources = [(new, here)]
        if ctx.past is not None:
            sources.insert(0, (ctx.past, Places(ctx.past_positions)))
        window = window_width(window_kinds, ctx.window)
        return attend_in_blocks(q, here, sources, window)

    plain = ctx.past is None and ctx.branch is None
    if not plain or q.shape[1] < LEAST_BLOCK or q.dtype == jnp.float64:
        return blockwise(q, new)

    def splash(q, new):
        from jaxlayers.decoder.splash import splash_attention  # Pallas is slow to import and TPU only

        branches = [lambda q, kv, w=w: splash_attention(q, kv, ctx.positions, w) for w in window_kinds]
        return jax.lax.switch(ctx.window, branches, q, new)

    return jax.lax.platform_dependent(q, new, tpu=splash, default=blockwise)


def packed_attention(
    q: Float[Array, "1 T H Q"], new: KeyValue, ctx: Context, window_kinds: tuple[int | None, ...]
) -> Float[Array, "1 T H Q"]:
    """Returns the attention of N sequences whose T tokens stand in one row, each among its own.

    `ctx.rows` says where each token of a sequence is; T stands for none. So everything but attention works on
    tokens without padding.
    """

    def apart(a, fill=0):
        return a[0].at[ctx.rows].get(mode="fill", fill_value=fill)

    kv = KeyValue(*(apart(a.swapaxes(1, 2)).swapaxes(1, 2) for a in new))
    branch = None if ctx.branch is None else apart(ctx.branch)
    ctx_apart = ctx._replace(positions=apart(ctx.positions, -1), branch=branch, rows=None)
    y = causal_attention(apart(q), kv, ctx_apart, window_kinds)
    return jnp.zeros_like(q[0]).at[ctx.rows].set(y, mode="drop")[None]


def window_width(
    window_kinds: tuple[int | None, ...], index: Int[Array, ""] | int
) -> Int[Array, ""] | int | None:
    """Returns how many keys a query sees, itself included; None for all of them."""
    if len(window_kinds) == 1:
        return window_kinds[0]
    widths = [jnp.iinfo(jnp.int32).max if w is None else w for w in window_kinds]
    return jnp.asarray(widths, jnp.int32)[index]


def visibility(queries: Places, keys: Places, window: Int[Array, ""] | int | None) -> Bool[Array, "B T S"]:
    """Returns which keys a query sees: real, not later, inside the window, and of no other branch."""
    at, of = queries.position[:, :, None], keys.position[:, None, :]
    seen = (of >= 0) & (of <= at)
    if window is not None:
        seen &= at - of < window
    if queries.branch is not None and keys.branch is not None:
        branch = keys.branch[:, None, :]
        seen &= (branch == 0) | (branch == queries.branch[:, :, None])
    return seen


def attend_in_blocks(
    q: Float[Array, "B T H Q"],
    places: Places,
    sources: Sequence[tuple[KeyValue, Places]],
    window: Int[Array, ""] | int | None,
) -> Float[Array, "B T H Q"]:
    """Returns attention of q over all sources, a block of queries at a time."""
    B, T, H, _ = q.shape
    keys = sum(kv.k.shape[2] for kv, _ in sources)
    block = max(LEAST_BLOCK, SCORES // (B * H * keys))

    def part(args):
        q, places = args
        return joint_attention(q, [Source(kv, visibility(places, at, window)) for kv, at in sources])

    if block >= T:
        return part((q, places))
    blocks = -(-T // block)
    padding = blocks * block - T
    q = jnp.pad(q, [(0, 0), (0, padding), (0, 0), (0, 0)])
    places = jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, padding)], constant_values=-1), places)
    split = lambda x: x.reshape(B, blocks, block, *x.shape[2:]).swapaxes(0, 1)
    # The checkpoint keeps the backward pass memory-linear: scores are computed again, not saved.
    y = jax.lax.map(jax.checkpoint(part), jax.tree.map(split, (q, places)))
    return y.swapaxes(0, 1).reshape(B, blocks * block, *q.shape[2:])[:, :T]


def joint_attention(q: Float[Array, "B T H Q"], sources: Sequence[Source]) -> Float[Array, "B T H Q"]:
    """Returns one softmax over the keys of all sources together; the softmax is in at least float32."""
    B, T, H, Q = q.shape
    K = sources[0].kv.k.shape[1]
    grouped = q.reshape(B, T, K, H // K, Q).transpose(0, 2, 3, 1, 4)  # head h = k * G + g
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = []
    for kv, visible in sources:
        s = jnp.einsum("bkgtq,bksq->bkgts", grouped, kv.k, preferred_element_type=wide) * Q**-0.5
        scores.append(jnp.where(visible[:, None, None], s, MASKED))
    top = scores[0].max(axis=-1, keepdims=True)
    for s in scores[1:]:
        top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    total, mass = 0.0, 0.0
    for s, (kv, _) in zip(scores, sources, strict=True):
        p = jnp.exp(s - top)
        mass += p.sum(axis=-1, keepdims=True)
        total += jnp.einsum("bkgts,bksq->bkgtq", p.astype(kv.v.dtype), kv.v, preferred_element_type=wide)
    y = at_least_float32(total) / mass
    return y.transpose(0, 3, 1, 2, 4).reshape(B, T, H, Q).astype(q.dtype)
