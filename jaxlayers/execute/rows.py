"""Runs a program: one scan over its rows, the lanes of a row in turn, each layer picked by its id."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.attention import KeyValue
from jaxlayers.decoder.stack import (
    Decoder,
    Params,
    at_layer,
    bind,
    context,
    embed,
    positions_of,
    unembed,
    window_indices,
)
from jaxlayers.generate.cache import Cache, read, write
from jaxlayers.program import ATTENTION, CONTINUE, MEAN, MLP, Program, as_program


class Visit(NamedTuple):
    """The table entries of one visit, or, with a leading axis, of the lanes of a row."""

    layer: Int[Array, ""]
    part: Int[Array, ""]
    scale: Float[Array, ""]
    group: Int[Array, ""]
    slot: Int[Array, ""]

    @property
    def attends(self) -> Bool[Array, ""]:
        return (self.layer >= 0) & (self.part != MLP)

    @property
    def feeds(self) -> Bool[Array, ""]:
        return (self.layer >= 0) & (self.part != ATTENTION)


class Lane(NamedTuple):
    """Where a row with several lanes stands: the group at work, and what groups before it added."""

    x: Float[Array, "B T D"]  # input of the group
    attention: Float[Array, "B T D"]  # sum of its attention branches so far
    mlp: Float[Array, "B T D"]  # sum of its MLP branches so far
    total: Float[Array, "B T D"]  # sum of all branches of the groups before
    trace: Float[Array, "W B T D"]  # inputs of the groups in the next Newton iteration


class Run(NamedTuple):
    """What a run leaves behind: `h` goes to `unembed`, `cache` to the next call."""

    h: Float[Array, "B T D"]  # the residual stream after the last row
    cache: Cache | None  # with the keys and values of this call written, where one was given
    collected: Float[Array, "C B T D"] | None  # the residual stream after each row of `collect`


def run(
    decoder: Decoder,
    h: Float[Array, "B T D"],
    program: Program | str,
    positions: Int[Array, "B T"],
    cache: Cache | None = None,
    collect: Sequence[int] | None = None,
    fresh: bool = False,
    active: Bool[Array, "R B"] | None = None,
    branch: Int[Array, "B T"] | None = None,
    packed: Int[Array, "N S"] | None = None,
) -> Run:
    """Runs the rows of a program over a residual stream.

    Args:
      h: the residual stream, as `embed` returns it.
      program: a table of layer ids below the decoder's depth; data, so that one compilation serves every
        program of its shape.
      positions: position of each token in its sequence, -1 at padding.
      cache: keys and values of earlier tokens, a slot for each visit. The T tokens are appended; without
        room for them the result is NaN.
      collect: rows whose result is returned, static; None for none.
      fresh: the cache is known to be empty, so nothing is read from it; static.
      active: which sequences each row is for, where they follow different programs; it passes by the rest.
      branch: 0 where a token is seen by all later ones of its sequence, b where by later ones of branch b
        alone: several continuations of one text in one sequence, their positions side by side.
      packed: where in the only row, B = 1, each token of N sequences of up to S tokens stands, T for none:
        sequences of different lengths run without padding.

    The carry is h and, in tables with lanes, the lane inputs of the row: a Newton iteration continues from
    them (h_l = h_{l-1} + r_l, with r_l at the previous iterate; J = I, arXiv 2605.17842), so that it is a row
    like any other.
    """
    program = as_program(program, decoder.config.layers)
    _check(decoder, program, cache, collect)
    if cache is not None and (branch is not None or packed is not None):
        raise ValueError("branches and packed sequences have no place in a cache; leave out one.")
    if packed is not None and h.shape[0] != 1:
        raise ValueError(f"packed sequences stand in one row, not in {h.shape[0]}.")
    lanes = program.layer.shape[1]
    collect = None if collect is None else tuple(collect)
    past = cache is not None and not fresh
    shared = context(decoder, positions, cache.positions if past else None, branch)._replace(rows=packed)
    windows = window_indices(decoder.config)

    # The steps take every array as an argument, because `once` differentiates them by a rule of its own.
    def branch_a(params, i, operands, x):
        visit, shared, windows, kv = operands
        ctx = shared._replace(window=windows[visit.layer], past=read(kv, visit.slot + i) if past else None)
        y, new = bind(decoder, params).attend(x, ctx)
        return y * visit.scale.astype(y.dtype), new

    def branch_m(params, visit, x):
        y = bind(decoder, params).feed(x)
        return y * visit.scale.astype(y.dtype)

    def attend_once(step, visit, kv, x):
        """Returns step's result, and kv with what the visit wrote."""
        operands = (visit, shared, windows, kv)
        x, new = once(step, visit.attends, decoder.layers, visit.layer, operands, (x, quiet))
        return x, write(kv, new, visit.slot, None if cache is None else cache.length)

    def one_lane(h, kv, visit):
        def attend(params, i, operands, state):
            y, new = branch_a(params, i, operands, state[0])
            return state[0] + y, new

        def feed(params, i, visit, h):
            return h + branch_m(params, visit, h)

        h, kv = attend_once(attend, visit, kv, h)
        return once(feed, visit.feeds, decoder.layers, visit.layer, visit, h), kv

    def side_by_side(h, trace, kv, visits, kind):
        goes_on = (kind == CONTINUE) & jnp.any(visits.layer >= 0)  # a row of padding changes nothing
        base = jnp.where(goes_on, take(trace, 0), h)  # the first lane reads the row's own input

        # Group by group, the attentions of a group before its MLPs: each reads a sum of those before it.
        def half(carry, table):
            lane, kv = carry
            visit, is_mlp, opens = table
            # A group's input in the trace gives way to that of the next iteration as soon as it is read.
            old = jnp.where(goes_on, take(lane.trace, visit.group), h)
            new = base + lane.total + lane.attention + lane.mlp
            lane = Lane(
                x=jnp.where(opens, old, lane.x),
                attention=jnp.where(opens, 0, lane.attention),
                mlp=jnp.where(opens, 0, lane.mlp),
                total=jnp.where(opens, lane.total + lane.attention + lane.mlp, lane.total),
                trace=put(lane.trace, jnp.where(opens, new, take(lane.trace, visit.group)), visit.group),
            )

            def attend(params, i, operands, state):
                (x, attention), _ = state
                y, new = branch_a(params, i, operands, x)
                return (x, attention + y), new

            def feed(params, i, visit, state):
                x, mlp = state
                return x, mlp + branch_m(params, visit, x)

            a = visit._replace(
                part=jnp.where(is_mlp, MLP, visit.part), slot=jnp.where(is_mlp, -1, visit.slot)
            )
            m = visit._replace(part=jnp.where(is_mlp, visit.part, ATTENTION))
            (_, attention), kv = attend_once(attend, a, kv, (lane.x, lane.attention))
            middle = lane.x + attention
            _, mlp = once(feed, m.feeds, decoder.layers, m.layer, m, (middle, lane.mlp))
            return (lane._replace(attention=attention, mlp=mlp), kv), None

        zeros = jnp.zeros_like(h)
        (lane, kv), _ = jax.lax.scan(half, (Lane(h, zeros, zeros, zeros, trace), kv), halves(visits))
        total = lane.total + lane.attention + lane.mlp
        groups = jnp.where(kind == MEAN, visits.group.max() + 1, 1)
        return base + total / groups, lane.trace, kv

    def row(carry, table):
        before, trace, kv, kept = carry
        visits, kind, place, active = table
        if trace is None:
            h, kv = one_lane(before, kv, jax.tree.map(lambda a: a[0], visits))
        else:
            h, trace, kv = side_by_side(before, trace, kv, visits, kind)
        if active is not None:
            h = jnp.where(active[:, None, None], h, before)
        if kept is not None:
            kept = put(kept, h, place)
        return (h, trace, kv, kept), None

    # What stands in for new keys and values where a visit has no attention.
    B, T = h.shape[:2]
    dtype = jax.tree.leaves(decoder.layers)[0].dtype
    config = decoder.config
    quiet = KeyValue(*[jnp.zeros((B, config.kv_heads, T, config.head_width), dtype)] * 2)
    place = places(collect or (), program.layer.shape[0])
    visits = Visit(program.layer, program.part, program.scale, jnp.maximum(program.group, 0), program.slot)
    trace = None if lanes == 1 else jnp.zeros((lanes, *h.shape), h.dtype)
    kept = None if collect is None else jnp.zeros((len(collect) + 1, *h.shape), h.dtype)
    carry = (h, trace, None if cache is None else cache.kv, kept)
    table = jax.tree.map(jnp.asarray, (visits, program.kind, place, active))
    (h, _, kv, kept), _ = jax.lax.scan(jax.checkpoint(row), carry, table)
    collected = None if collect is None else kept[place[jnp.asarray(collect, jnp.int32)]]
    if cache is None:
        return Run(h, None, collected)
    # Writing past the end would overwrite earlier tokens: give no number rather than a wrong one.
    h = jnp.where(cache.length + T <= cache.positions.shape[1], h, jnp.nan)
    return Run(h, cache.appended(kv, positions), collected)


def places(collect: Sequence[int], rows: int) -> Int[Array, " R"]:
    """Returns where each row's result is kept: its place in collect, or the spare place behind them."""
    place = jnp.full(rows, len(collect), jnp.int32)
    return place.at[jnp.asarray(collect, jnp.int32)].set(jnp.arange(len(collect), dtype=jnp.int32))


def _check(decoder: Decoder, program: Program, cache: Cache | None, collect: Sequence[int] | None) -> None:
    if isinstance(program.layer, np.ndarray) and isinstance(program.slot, np.ndarray):  # on the host
        slots = program.slot[program.slot >= 0]
        if program.layer.max(initial=-1) >= program.depth:
            raise ValueError(f"the program's table names layer {program.layer.max()} of {program.depth}.")
        if len(set(slots.tolist())) < len(slots) or slots.max(initial=-1) >= program.slots:
            raise ValueError(
                f"the program's table must give each visit a slot of its own below {program.slots}."
            )
    if cache is not None and cache.kv.k.shape[0] < program.slots:
        raise ValueError(
            f"the program writes {program.slots} slots and the cache has {cache.kv.k.shape[0]}; "
            "make the cache with this program, or pad the program to the cache's slots."
        )
    rows = program.layer.shape[0]
    if collect is not None and not all(0 <= row < rows for row in collect):
        raise ValueError(f"collect={tuple(collect)} names a row outside 0..{rows - 1}.")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once(
    step: Callable, active: Bool[Array, ""], layers: Params, layer: Int[Array, ""], operands: Any, x: Any
):
    """Returns step(parameters of the layer, 0, operands, x) where active, and x untouched where not.

    It is a loop of one trip or none rather than a `lax.cond`: a loop updates its carry in place, a
    conditional puts its results in buffers of their own. The trip number is added to every index, so that
    the compiler cannot move a layer's slice out of the loop, where it would be copied. Differentiated, it is
    a conditional on the layer's own slice, so that a gradient has the size of one layer, not of all of them.
    """

    def trip(i, x):
        return at_layer(layers, layer + i, lambda params: step(params, i, operands, x))

    return jax.lax.fori_loop(0, active.astype(jnp.int32), trip, x)


@once.defjvp
def _(step, primals, tangents):
    def conditional(active, layers, layer, operands, x):
        if isinstance(layers, tuple):
            do = lambda: at_layer(layers, layer, lambda params: step(params, 0, operands, x))
        else:
            params = at_layer(layers, layer, lambda params: params)
            do = lambda: step(params, 0, operands, x)
        return jax.lax.cond(active, do, lambda: x)

    return jax.jvp(conditional, primals, tangents)


def halves(visits: Visit) -> tuple[Visit, Bool[Array, " N"], Bool[Array, " N"]]:
    """Returns the visits of a row twice, N = 2 W, in order of groups and in each the attentions first.

    With them, whether it is the MLP's turn, and whether a group begins. Padding stands last.
    """
    W = visits.layer.shape[0]
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), visits)
    is_mlp = jnp.arange(2 * W) >= W
    order = jnp.argsort(jnp.where(twice.layer < 0, 2 * W, 2 * twice.group + is_mlp), stable=True)
    twice, is_mlp = jax.tree.map(lambda a: a[order], (twice, is_mlp))
    begins = jnp.concatenate([jnp.ones(1, bool), twice.group[1:] != twice.group[:-1]])
    return twice, is_mlp, begins & (twice.layer >= 0)


def take(stacked: Float[Array, " N *S"], index: Int[Array, ""]) -> Float[Array, "*S"]:
    """Returns one entry along the leading axis."""
    return jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)


def put(
    stacked: Float[Array, " N *S"], x: Float[Array, "*S"], index: Int[Array, ""]
) -> Float[Array, " N *S"]:
    """Returns stacked with x as one entry along the leading axis."""
    return jax.lax.dynamic_update_index_in_dim(stacked, x, index, 0)


def forward(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    program: Program | str | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Returns the logits of every token under a program, in at least float32.

    `program` may be a text; None is the plain model. `mask` is true at real tokens, which stand together in
    a row with padding before or after. An id outside the vocabulary gives NaN; padding may hold any id.
    """
    program, tokens = as_program(program, decoder.config.layers), jnp.asarray(tokens)
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be whole numbers [B, T], not {tokens.dtype} {list(tokens.shape)}.")
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    tokens = jnp.where(mask, tokens, 0)
    return unembed(decoder, run(decoder, embed(decoder, tokens), program, positions_of(mask)).h)
