"""jax's splash attention for TPU, behind the shapes used here."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlayers.decoder.attention import KeyValue
from jaxlayers.mesh import RULES

LANES = 128
BLOCK = 512


def splash_attention(
    q: Float[Array, "B T H Q"],
    kv: KeyValue,
    positions: Int[Array, "B T"],
    window: int | None,
    interpret: bool = False,
) -> Float[Array, "B T H Q"]:
    """Returns causal attention inside one call; a position of -1 is padding, window counts the query.

    On a mesh of several devices the kernel runs under `shard_map`, since the compiler cannot partition it:
    batch and heads are spread over their mesh axes where they divide, the rest is replicated. `interpret`
    runs it without a TPU, slowly.
    """
    mesh = jax.typeof(q).sharding.mesh
    kernel = functools.partial(_one_device, window=window, interpret=interpret)
    if mesh.empty or mesh.size == 1:
        return kernel(q, kv, positions)

    def spread(logical: str, size: int) -> tuple[str, ...] | None:
        rule = RULES[logical]
        names = tuple(n for n in ((rule,) if isinstance(rule, str) else rule or ()) if n in mesh.shape)
        return names if names and size % math.prod(mesh.shape[n] for n in names) == 0 else None

    batch, heads = spread("batch", q.shape[0]), spread("heads", kv.k.shape[1])
    heads_last, heads_second = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
    return jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(heads_last, heads_second, PartitionSpec(batch)),
        out_specs=heads_last,
        check_vma=False,
    )(q, kv, positions)


def _one_device(q, kv, positions, window, interpret):
    B, T, H, Q = q.shape
    K = kv.k.shape[1]
    block = min(BLOCK, -(-T // LANES) * LANES)
    length = -(-T // block) * block
    pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, length - T), (0, -Q % LANES)])
    grouped = (q * Q**-0.5).reshape(B, T, K, H // K, Q).transpose(0, 2, 3, 1, 4)
    # Padding is a segment of its own: real tokens never see it and it never sees them.
    segments = jnp.pad((positions >= 0).astype(jnp.int32), [(0, 0), (0, length - T)])
    size = (length, length)
    mask = masks.CausalMask(size) if window is None else masks.LocalMask(size, (window - 1, 0), 0)
    forward = {name: block for name in ("block_q", "block_kv", "block_kv_compute")}
    backward = {
        name: block
        for name in ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    }
    mqa = splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * (H // K)),
        block_sizes=splash.BlockSizes(**forward, **backward),
        interpret=interpret,
    )
    heads = jax.vmap(lambda q, k, v, s: mqa(q, k, v, splash.SegmentIds(s, s)), in_axes=(0, 0, 0, None))
    y = jax.vmap(heads)(pad(grouped), pad(kv.k), pad(kv.v), segments)
    return y[:, :, :, :T, :Q].transpose(0, 3, 1, 2, 4).reshape(B, T, H, Q).astype(q.dtype)
