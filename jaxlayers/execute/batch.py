"""Different programs in one batch: a common schedule of ticks, each for the sequences that want its rows.

A step of a program is a row, or a Newton row with its continuations. All programs of a batch are merged
into one sequence of steps that contains each of them in order; a sequence passes by the ticks that are not
its own. The merge is made once for a set of programs, on the host, and is itself a program.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.attention import KeyValue
from jaxlayers.decoder.stack import Decoder, embed, last_logits, positions_of
from jaxlayers.execute.rows import run
from jaxlayers.execute.step import bucket, isolate
from jaxlayers.generate.cache import Cache, new_cache
from jaxlayers.program import Program, as_program
from jaxlayers.program_text import Item

Steps = tuple[Item, ...]  # a program's


@functools.partial(jax.tree_util.register_dataclass, data_fields=["program", "active"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Schedule:
    """A program that contains those of all sequences, and the rows of it that belong to each.

    Sequences with equal programs run together. A slot belongs to a tick: a sequence leaves those of the ticks
    it passes by unused, which costs memory and saves gathering a slot for each sequence.
    """

    program: Program
    active: Bool[Array, "R B"] | None  # None: every row is for all


def programs_of(
    program: Program | str | Sequence[Program | str | None] | None, count: int, depth: int
) -> list[Program]:
    """Returns the program of each of `count` sequences, from one for all or from one for each.

    Raises ValueError for another number of programs, and where one is none for a model of `depth` layers.
    """
    if not isinstance(program, Sequence) or isinstance(program, str):
        return [as_program(program, depth)] * count
    if len(program) != count:
        raise ValueError(
            f"there are {len(program)} programs for {count} prompts; give one for each, or one for all."
        )
    return [as_program(each, depth) for each in program]


def as_schedule(program: Program | Schedule | str | None, depth: int, batch: int) -> Schedule:
    """Returns the schedule itself, or that of one program for all sequences.

    Raises ValueError for a schedule of another batch, and where `as_program` does.
    """
    if not isinstance(program, Schedule):
        return Schedule(as_program(program, depth), None)
    as_program(program.program, depth)
    if program.active is not None and program.active.shape[1] != batch:
        raise ValueError(
            f"the schedule is for {program.active.shape[1]} sequences and the batch has {batch}; "
            "make it of one program for each sequence."
        )
    return program


def schedule(programs: Sequence[Program]) -> Schedule:
    """Returns the common schedule of the programs, one for each sequence of a batch.

    It is a common supersequence, the shortest that a few greedy rules find: at least as many ticks as the
    longest program has steps and at most as many as all distinct ones. Its table is padded to one of few
    shapes, so that other programs seldom need another compilation; where all programs are equal, it is the
    first of them as it is.

    Raises ValueError for no program or for programs of different depth.
    """
    if not programs:
        raise ValueError("there is no program; give one for each sequence.")
    depths = {program.depth for program in programs}
    if len(depths) > 1:
        raise ValueError(
            f"the programs are for models of different depth, {sorted(depths)}; give programs for one model."
        )
    if len(set(programs)) == 1:
        return Schedule(programs[0], None)
    rows_of = defaultdict(list)  # distinct programs, and the sequences that follow each
    for sequence, program in enumerate(programs):
        rows_of[program.items].append(sequence)
    merged = (_merge(list(rows_of), rank) for rank in (_most_work, _farthest_behind, _lowest_layer))
    ticks = min(merged, key=lambda ticks: sum(step.visits for step, _ in ticks))
    program = Program.of([step for step, _ in ticks], depths.pop())
    program = program.pad(*(bucket(n, steps=4) for n in (program.rows, program.lanes, program.slots)))
    active = np.zeros((program.rows, len(programs)), bool)
    row = 0
    for step, takers in ticks:
        active[row : row + step.iterations, [i for items in takers for i in rows_of[items]]] = True
        row += step.iterations
    return Schedule(program, active)


def _merge(
    programs: Sequence[Steps], rank: Callable[[Item, list[int]], tuple[int, int]]
) -> list[tuple[Item, list[Steps]]]:
    """Returns ticks that hold every program in order, and the programs that each is for.

    Each tick is the step of highest rank among those that come next; `rank` is given the step and how many
    steps are left to each program that wants it.
    """
    done = dict.fromkeys(programs, 0)
    ticks = []
    while True:
        takers: dict[Item, list[Steps]] = defaultdict(list)
        for items, at in done.items():
            if at < len(items):
                takers[items[at]].append(items)
        if not takers:
            return ticks
        step = max(takers, key=lambda step: rank(step, [len(items) - done[items] for items in takers[step]]))
        ticks.append((step, takers[step]))
        for items in takers[step]:
            done[items] += 1


def _most_work(step: Item, left: list[int]) -> tuple[int, int]:
    return sum(left), 0


def _farthest_behind(step: Item, left: list[int]) -> tuple[int, int]:
    return max(left), sum(left)


def _lowest_layer(step: Item, left: list[int]) -> tuple[int, int]:
    # Most programs climb: those ahead wait, at the layer after a loop, for those that are still in it.
    return -min(layer for lane in step.lanes for layer, _ in lane), sum(left)


def prefill(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    plan: Schedule,
    length: int | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits that follow each row's last real token, and a cache of `length` columns (default T).

    Like `generate.decode.prefill`, with a program for each sequence. Each tick computes only the sequences
    that want it, packed together. Runs on the host: do not put it under `jax.jit`. Raises ValueError where
    the tokens do not fit the cache or the schedule another batch.
    """
    B, T = tokens.shape
    plan = as_schedule(plan, decoder.config.layers, B)
    length = T if length is None else length
    if length < T:
        raise ValueError(f"a cache of {length} columns cannot hold {T} tokens; make it at least {T}.")
    mask = jnp.ones((B, T), bool) if mask is None else jnp.asarray(mask)
    h, positions = _start(decoder, tokens, mask)
    cache = new_cache(decoder, plan.program, B, length)
    active = np.ones((plan.program.rows, B), bool) if plan.active is None else np.asarray(plan.active)
    slot = row = 0
    for step in plan.program.items:
        sequences = np.flatnonzero(active[row])
        rows = np.full(bucket(len(sequences), B), B, np.int32)  # B is no sequence: it is dropped
        rows[: len(sequences)] = sequences
        part, program = isolate(decoder, step)
        h, new = _tick(part, h, positions, program, rows)
        cache = dataclasses.replace(cache, kv=_store(cache.kv, new, rows, slot))
        slot += program.slots
        row += step.iterations
    return _end(decoder, h, mask, cache, positions)


@jax.jit
def _start(decoder, tokens, mask):
    return embed(decoder, tokens), positions_of(mask)


@functools.partial(jax.jit, donate_argnames="cache")
def _end(decoder, h, mask, cache, positions):
    # In one call, so that jax counts the whole cache as placed, as it does that of a decode step: one
    # compilation of what comes next serves both.
    return last_logits(decoder, h, mask), cache.appended(cache.kv, positions)


@functools.partial(jax.jit, donate_argnames="h")
def _tick(decoder, h, positions, program, rows):
    """Runs a step for some rows of the batch; entries of `rows` beyond the batch are padding.

    Returns h and the step's keys and values. It does not see the cache, whose shape is that of the schedule:
    one compilation serves every schedule.
    """
    some = lambda a: a.at[rows].get(mode="clip")
    cache = new_cache(decoder, program, len(rows), h.shape[1])
    done = run(decoder, some(h), program, some(positions), cache, fresh=True)
    return h.at[rows].set(done.h, mode="drop"), KeyValue(*(a[: program.slots] for a in done.cache.kv))


@functools.partial(jax.jit, donate_argnames="kv")
def _store(kv, new, rows, slot):
    """Returns kv with a step's keys and values in the slots from `slot` on."""
    N, _, _, T, _ = new.k.shape
    slots = slot + jnp.arange(N)[:, None]
    return KeyValue(*(old.at[slots, rows, :, :T].set(a, mode="drop") for old, a in zip(kv, new, strict=True)))
