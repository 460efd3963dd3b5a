"""Runs a program: one scan over its rows, the lanes of a row one after another, each layer picked by its id."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.stack import (
    Decoder,
    context,
    embed,
    positions_of,
    unembed,
    window_indices,
    with_layer,
)
from jaxlayers.generate.cache import Cache, read, write
from jaxlayers.program import ATTENTION, CONTINUE, MEAN, MLP, Program, identity


class Visit(NamedTuple):
    """The table entries of one visit, or, with a leading axis, of the lanes of a row."""

    layer: Int[Array, ""]
    part: Int[Array, ""]
    scale: Float[Array, ""]
    group: Int[Array, ""]
    slot: Int[Array, ""]


def take(stacked: Float[Array, "N *S"], index: Int[Array, ""]) -> Float[Array, "*S"]:
    return jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)


def add(sums: Float[Array, "N *S"], y: Float[Array, "*S"], index: Int[Array, ""]) -> Float[Array, "N *S"]:
    return jax.lax.dynamic_update_index_in_dim(sums, take(sums, index) + y, index, 0)


class Run(NamedTuple):
    """What a run leaves behind."""

    h: Float[Array, "B T D"]  # the residual stream after the last row
    cache: Cache | None  # with the keys and values of this call written, where one was given
    collected: Float[Array, "C B T D"] | None  # the residual stream after each row of `collect`


def run(
    decoder: Decoder,
    h: Float[Array, "B T D"],
    program: Program,
    positions: Int[Array, "B T"],
    cache: Cache | None = None,
    collect: Sequence[int] | None = None,
) -> Run:
    """Runs the rows of a program over a residual stream.

    Args:
      h: the residual stream, as `embed` returns it.
      program: a table of layer ids below the decoder's depth; data, so that one compilation serves every
        program of its shape.
      positions: position of each token in its sequence, -1 at padding.
      cache: keys and values of earlier tokens, a slot per visit. The T tokens are appended; the caller sees
        to it that there is room (`Cache.room`).
      collect: rows whose result is returned, static; None for none.

    The carry is h and, in tables with lanes, the lane inputs of the row: a Newton iteration continues from
    them (h_l = h_{l-1} + r_l, with r_l at the previous iterate; J = I, arXiv 2605.17842), so that it is a row
    like any other.
    """
    if program.depth != decoder.config.layers:
        raise ValueError(
            f"the program is for {program.depth} layers and the decoder has {decoder.config.layers}; "
            f"parse it with depth={decoder.config.layers}."
        )
    rows, lanes = program.layer.shape
    if cache is not None and cache.kv.k.shape[0] < program.slots:
        raise ValueError(
            f"the program writes {program.slots} slots and the cache has {cache.kv.k.shape[0]}; "
            "make the cache with this program, or pad the program to the cache's slots."
        )
    collect = None if collect is None else tuple(collect)
    if collect is not None and not all(0 <= row < rows for row in collect):
        raise ValueError(f"collect={collect} names a row outside 0..{rows - 1}.")

    shared = context(decoder, positions, None if cache is None else cache.positions)
    start = None if cache is None else cache.length
    windows = window_indices(decoder.config)
    place = jnp.full(rows, len(collect or ()), jnp.int32)
    if collect is not None:
        place = place.at[jnp.asarray(collect, jnp.int32)].set(jnp.arange(len(collect)))

    def attend(x, layer, scale, past):
        def branch(module):
            y, kv = module.attend(x, shared._replace(window=windows[layer], past=past))
            return y * scale.astype(y.dtype), kv

        return with_layer(decoder, layer, branch)

    def feed(x, layer, scale):
        def branch(module):
            y = module.feed(x)
            return y * scale.astype(y.dtype)

        return with_layer(decoder, layer, branch)

    quiet = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        jax.eval_shape(lambda: attend(h, 0, jnp.float32(1), None if cache is None else read(cache.kv, 0))),
    )

    def row(carry, table):
        h, trace, kv, kept = carry
        visits, kind, place = table
        goes_on = kind == CONTINUE
        inputs = h[None] if trace is None else jnp.where(goes_on, trace, h)

        def attend_lane(carry, visit):
            sums, kv = carry
            active = (visit.layer >= 0) & (visit.part != MLP)

            # The branch reads the cache and returns only the new keys and values: a cache that went through
            # the conditional as a result would be copied for every visit.
            def do():
                past = None if cache is None else read(kv, visit.slot)
                return attend(take(inputs, visit.group), visit.layer, visit.scale, past)

            y, new = jax.lax.cond(active, do, lambda: quiet)
            return (add(sums, y, visit.group), write(kv, new, visit.slot, start)), None

        def feed_lane(sums, visit):
            active = (visit.layer >= 0) & (visit.part != ATTENTION)
            x = take(inputs, visit.group) + take(attention, visit.group)
            y = jax.lax.cond(active, lambda: feed(x, visit.layer, visit.scale), lambda: jnp.zeros_like(h))
            return add(sums, y, visit.group), None

        (attention, kv), _ = jax.lax.scan(attend_lane, (jnp.zeros_like(inputs), kv), visits)
        mlp, _ = jax.lax.scan(feed_lane, jnp.zeros_like(inputs), visits)
        residuals = attention + mlp
        if trace is None:
            h = h + residuals[0]
        else:
            base = inputs[0]  # the first lane of a Newton row always reads the row's own input
            ends = base + jnp.cumsum(residuals, axis=0)
            trace = jnp.concatenate([base[None], ends[:-1]])
            groups = jnp.maximum(visits.group.max() + 1, 1)
            h = jnp.where(kind == MEAN, base + residuals.sum(axis=0) / groups, ends[-1])
        if kept is not None:
            kept = jax.lax.dynamic_update_index_in_dim(kept, h, place, 0)
        return (h, trace, kv, kept), None

    trace = None if lanes == 1 else jnp.zeros((lanes, *h.shape), h.dtype)
    kept = None if collect is None else jnp.zeros((len(collect) + 1, *h.shape), h.dtype)
    visits = Visit(program.layer, program.part, program.scale, jnp.maximum(program.group, 0), program.slot)
    table = (visits, program.kind, place)
    carry = (h, trace, None if cache is None else cache.kv, kept)
    (h, _, kv, kept), _ = jax.lax.scan(jax.checkpoint(row), carry, jax.tree.map(jnp.asarray, table))
    if cache is not None:
        # Writing past the end would overwrite earlier tokens: give no number rather than a wrong one.
        h = jnp.where(start + h.shape[1] <= cache.positions.shape[1], h, jnp.nan)
    return Run(
        h,
        None if cache is None else cache.appended(kv, positions),
        None if kept is None else kept[place[jnp.asarray(collect, jnp.int32)]],
    )


def forward(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    program: Program | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Returns the logits of every token under a program, in at least float32.

    `program` None is the plain model; `mask` is true at real tokens, which stand together in a row with
    padding before or after. An id outside the vocabulary gives NaN.
    """
    program = identity(decoder.config.layers) if program is None else program
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    return unembed(decoder, run(decoder, embed(decoder, tokens), program, positions_of(mask)).h)
