"""Prefill and decode as pure functions, and the loop that generates."""

import dataclasses
import functools
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.stack import Decoder, embed, fastest_form, last_logits, positions_of, unembed
from jaxlayers.execute import batch
from jaxlayers.execute.rows import run
from jaxlayers.generate.cache import Cache, check_memory, new_cache
from jaxlayers.generate.sampling import Sampling, sample
from jaxlayers.program import Program, as_program

OVERFLOW = -2  # in place of a token
CAUSE = "its scales or repeats overflow float32, or the weights do"
BUCKET = 64  # prompts and caches are padded to multiples of this, so that few shapes are compiled


def prefill(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    program: Program | str | None = None,
    length: int | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits that follow each row's last real token, and a cache of `length` columns (default T).

    `mask` is true at real tokens, padding may stand before or after them. Raises ValueError where the tokens
    do not fit.
    """
    tokens = jnp.asarray(tokens)
    B, T = tokens.shape
    program = as_program(program, decoder.config.layers)
    length = T if length is None else length
    if length < T:
        raise ValueError(f"a cache of {length} columns cannot hold {T} tokens; make it at least {T}.")
    mask = jnp.ones((B, T), bool) if mask is None else mask
    cache = new_cache(decoder, program, B, length)
    done = run(decoder, embed(decoder, tokens), program, positions_of(mask), cache, fresh=True)
    assert done.cache is not None
    return last_logits(decoder, done.h, mask), done.cache


def decode_step(
    decoder: Decoder,
    token: Int[Array, " B"],
    cache: Cache,
    program: Program | batch.Schedule | str | None = None,
    active: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits that follow one more token a row, and the cache with that token.

    A schedule gives each row a program of its own. Every tick of it computes the whole batch, because a step
    of one token reads most weights whatever is left out. Rows that are not `active` leave a hole in their
    column. Without room in the cache the logits are NaN. Donate the cache under `jax.jit` to have it updated
    in place. Raises ValueError where token, cache and schedule are of different batches.
    """
    rows = cache.positions.shape[0]
    if token.shape != (rows,):
        raise ValueError(f"token has shape {list(token.shape)} and the cache {rows} rows; give one for each.")
    plan = batch.as_schedule(program, decoder.config.layers, rows)
    active = jnp.ones(token.shape, bool) if active is None else active
    h, positions = embed(decoder, token[:, None]), cache.next_positions(active[:, None])
    done = run(decoder, h, plan.program, positions, cache, active=plan.active)
    assert done.cache is not None
    return unembed(decoder, done.h[:, 0]), done.cache


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "done", "cache"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Where generation stands: the last token of each row is drawn and not yet in the cache."""

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    cache: Cache


@jax.jit
def _draw(
    logits: Float[Array, "B V"], sampling: Sampling, positions: Int[Array, " B"], stops: Int[Array, " N"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Returns the next token of each row, and whether the row ends with it.

    The token is `OVERFLOW` where the logits are not finite, and the row ends there.
    """
    token = jnp.where(jnp.all(jnp.isfinite(logits), axis=1), sample(logits, sampling, positions), OVERFLOW)
    return token, jnp.any(token[:, None] == stops, axis=1) | (token == OVERFLOW)


_prefill = jax.jit(prefill, static_argnames="length")


def start(
    decoder: Decoder,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    plan: batch.Schedule,
    sampling: Sampling,
    stops: Int[Array, " N"],
    length: int,
) -> State:
    """Returns the state after the prompt: its first new token is drawn."""
    if plan.active is None:
        logits, cache = _prefill(decoder, tokens, plan.program, length, mask)
    else:
        logits, cache = batch.prefill(decoder, tokens, plan, length, mask)
    return State(*_draw(logits, sampling, np.sum(mask, axis=1, dtype=np.int32), stops), cache)


@functools.partial(jax.jit, static_argnames="block", donate_argnames="state")
def advance(
    decoder: Decoder,
    state: State,
    plan: batch.Schedule,
    sampling: Sampling,
    stops: Int[Array, " N"],
    steps: Int[Array, ""] | int,
    block: int,
) -> tuple[Int[Array, "B N"], State]:
    """Returns up to `steps` <= `block` more tokens a row, -1 where there is none, and the state after them.

    The loop runs on the device and ends early once every row has ended. The state is donated.
    """

    def step(carry):
        i, tokens, state = carry
        logits, cache = decode_step(decoder, state.token, state.cache, plan, ~state.done)
        used = jnp.sum(cache.positions >= 0, axis=1, dtype=jnp.int32)
        token, ends = _draw(logits, sampling, used, stops)
        token = jnp.where(state.done, state.token, token)
        tokens = tokens.at[:, i].set(jnp.where(state.done, -1, token))
        return i + 1, tokens, State(token, state.done | ends, cache)

    going = lambda carry: (carry[0] < steps) & ~jnp.all(carry[2].done)
    tokens = jnp.full((state.token.shape[0], block), -1, jnp.int32)
    _, tokens, state = jax.lax.while_loop(going, step, (0, tokens, state))
    return tokens, state


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    program: Program | str | Sequence[Program | str | None] | None = None,
    *,
    max_tokens: int = 64,
    sampling: Sampling | None = None,
    stops: Sequence[int] = (),
    block: int = 16,
) -> Generator[list[list[int]], None, None]:
    """Yields the new ids of each row, at most `block` at a time, until all have ended.

    A row ends after one of the ids in `stops`, which is its last, or after `max_tokens`. Close the iterator
    to end early; what was yielded before does not depend on `block` nor on the other rows. `program` is one
    for all prompts, or a sequence with one for each.

    Raises ValueError for an empty prompt, an id outside the vocabulary, where prompt and new tokens exceed
    the decoder's context, for programs that are not as many as the prompts, and where a program's logits are
    not finite.
    """
    sampling = (sampling or Sampling()).checked()
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}.")
    check_prompts(decoder, prompts, max_tokens)
    programs = batch.programs_of(program, len(prompts), decoder.config.layers)
    plan = batch.schedule(programs)
    tokens, mask = right_padded(prompts, BUCKET)
    length = -(-(tokens.shape[1] + max_tokens) // BUCKET) * BUCKET
    check_ids(decoder, [list(stops)], "stops")
    ends = jnp.asarray(sorted(set(stops)) or [-1], jnp.int32)
    check_memory(decoder, plan.program, len(prompts), length)
    decoder = fastest_form(decoder)
    state = start(decoder, tokens, mask, plan, sampling, ends, length)
    new = np.asarray(state.token)[:, None]
    made = 1
    while True:
        if (new == OVERFLOW).any():
            row = int(np.argmax((new == OVERFLOW).any(axis=1)))
            raise ValueError(f"program {programs[row]} gives logits that are not finite; {CAUSE}.")
        yield [[int(t) for t in row if t >= 0] for row in new]
        steps = min(block, max_tokens - made)
        if steps < 1 or bool(np.all(np.asarray(state.done))):
            return
        new, state = advance(decoder, state, plan, sampling, ends, steps, block)
        new = np.asarray(new)
        made += steps


def check_prompts(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raises ValueError, naming the prompt, where generation could not give what was asked."""
    config = decoder.config
    if not len(prompts):
        raise ValueError("there is no prompt; give at least one.")
    if isinstance(prompts, str) or np.ndim(prompts[0]) != 1:
        raise ValueError("prompts must be one or more sequences of ids, such as [tokenizer.encode(text)].")
    if max_tokens < 1 or max_tokens != int(max_tokens):
        raise ValueError(f"max_tokens must be at least 1 and a whole number, not {max_tokens}.")
    check_ids(decoder, prompts)
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; give at least one token.")
        if len(prompt) + max_tokens > config.context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens and {max_tokens} new ones are asked for, but the "
                f"model's context is {config.context}; shorten the prompt or ask for fewer."
            )


def check_ids(decoder: Decoder, prompts: Sequence[Sequence[int]], name: str = "prompt {}") -> None:
    """Raises ValueError where an id is outside the vocabulary: on the device it would give NaN."""
    last = decoder.config.vocab - 1
    for i, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name.format(i)} holds {ids.dtype} where ids are whole numbers.")
        wrong = ids[(ids < 0) | (ids > last)]
        if wrong.size:
            raise ValueError(f"{name.format(i)} holds id {wrong[0]}, outside the vocabulary 0..{last}.")


def right_padded(
    prompts: Sequence[Sequence[int]], multiple: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Returns the prompts as one array, padded behind to a multiple, and which of its tokens are real."""
    width = -(-max(map(len, prompts)) // multiple) * multiple
    tokens = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = True
    return tokens, mask
