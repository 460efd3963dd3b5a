"""jax's splash attention for TPU, behind the shapes used here."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

LANES = 128
BLOCK = 512


def splash_attention(
    q: Float[Array, "B T H Q"], kv, positions: Int[Array, "B T"], window: int | None, interpret: bool = False
) -> Float[Array, "B T H Q"]:
    """Returns causal attention inside one call; a position of -1 is padding, window counts the query.

    `interpret` runs the kernel without a TPU, slowly.
    """
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
    mask = masks.MultiHeadMask([mask] * (H // K))
    sizes = {
        name: block
        for name in (
            "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute "
            "block_q_dq block_kv_dq"
        ).split()
    }
    mqa = kernel.make_splash_mqa_single_device(
        mask, block_sizes=kernel.BlockSizes(**sizes), interpret=interpret
    )
    run = lambda q, k, v, s: mqa(q, k, v, kernel.SegmentIds(s, s))
    heads = jax.vmap(run, in_axes=(0, 0, 0, None))
    y = jax.vmap(heads)(pad(grouped), pad(kv.k), pad(kv.v), segments)
    return y[:, :, :, :T, :Q].transpose(0, 3, 1, 2, 4).reshape(B, T, H, Q).astype(q.dtype)
