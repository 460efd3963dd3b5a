"""The KV cache: a slot for every visit that attends, never one for a layer."""

import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.attention import KeyValue, row_major
from jaxlayers.decoder.stack import Decoder
from jaxlayers.program import Program


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["kv", "positions", "length"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of N slots, in columns shared by the batch.

    Column s holds token s of the calls so far; a row of a ragged batch has holes, marked by position -1.
    """

    kv: KeyValue  # k and v are [N, B, K, S, Q]
    positions: Int[Array, "B S"]
    length: Int[Array, ""]  # columns in use

    def next_positions(self, mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
        """Returns positions of new tokens, going on where each row's real tokens end; -1 at padding."""
        used = jnp.sum(self.positions >= 0, axis=1, dtype=jnp.int32, keepdims=True)
        return jnp.where(mask, used + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, -1)

    def appended(self, kv: KeyValue, positions: Int[Array, "B T"]) -> "Cache":
        """Returns the cache with the columns of a call, whose keys and values are in kv, counted in."""
        written = jax.lax.dynamic_update_slice_in_dim(self.positions, positions, self.length, axis=1)
        return Cache(kv, written, self.length + positions.shape[1])

    def rolled_back(self, length: Int[Array, ""] | int) -> "Cache":
        """Returns the cache as it was when it held `length` columns."""
        kept = jnp.arange(self.positions.shape[1]) < length
        return Cache(self.kv, jnp.where(kept, self.positions, -1), jnp.asarray(length, jnp.int32))


def new_cache(
    decoder: Decoder, program: Program, batch: int, length: int, dtype: DTypeLike | None = None
) -> Cache:
    """Returns an empty cache for `length` tokens under a program, in the dtype of the weights by default."""
    if batch < 1 or length < 1:
        raise ValueError(
            f"a cache needs at least one row and one column, not batch {batch}, length {length}."
        )
    config = decoder.config
    dtype = dtype or jax.tree.leaves(decoder.layers)[0].dtype
    # At least one slot, which a program of MLPs alone leaves empty: an index needs something to point into.
    shape = (max(program.slots, 1), batch, config.kv_heads, length, config.head_width)
    return Cache(
        KeyValue(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)),
        jnp.full((batch, length), -1, jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def check_memory(decoder: Decoder, program: Program, batch: int, length: int) -> None:
    """Raises MemoryError where a cache would exceed the memory of the device.

    Asking for it would fail late and without a reason, or, on CPU, never come back.
    """
    config, leaf = decoder.config, jax.tree.leaves(decoder.layers)[0]
    columns = 2 * program.slots * batch * config.kv_heads * config.head_width * leaf.dtype.itemsize
    devices = leaf.devices()
    device = next(iter(devices))
    if device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    else:
        limit = ((device.memory_stats() or {}).get("bytes_limit") or math.inf) * len(devices)
    if limit and columns * length > limit:
        raise MemoryError(
            f"a cache of {length} tokens in {batch} rows and {program.slots} slots takes "
            f"{columns * length / 1e9:.0f} GB, and there are {limit / 1e9:.0f}; ask for fewer tokens or rows."
        )


def read(kv: KeyValue, slot: Int[Array, ""]) -> KeyValue:
    """Returns the keys and values [B, K, S, Q] of one slot."""
    return KeyValue(*(jax.lax.dynamic_index_in_dim(a, slot, keepdims=False) for a in kv))


def write(
    kv: KeyValue | None, new: KeyValue, slot: Int[Array, ""], start: Int[Array, ""] | None
) -> KeyValue | None:
    """Returns kv with new tokens' keys and values in a slot from column `start` on; slot -1 writes none."""
    if kv is None:
        return None

    def put(old: Float[Array, "N B K S Q"], new: Float[Array, "B K T Q"]):
        at = tuple(jnp.asarray(i, jnp.int32) for i in (slot, 0, 0, start, 0))
        # Unpinned, the layout that suits a single token would spread to the cache and have it copied.
        kept = jax.lax.dynamic_slice(old, at, (1, *new.shape))
        update = row_major(jnp.where(slot >= 0, new[None].astype(old.dtype), kept))
        return row_major(jax.lax.dynamic_update_slice(old, update, at))

    return KeyValue(put(kv.k, new.k), put(kv.v, new.v))
