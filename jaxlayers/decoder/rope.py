"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlayers.decoder.config import Rope
from jaxlayers.decoder.norm import at_least_float32


def frequencies(rope: Rope, head_width: int) -> np.ndarray:
    """Returns the angle per position of each pair, float64 [Q/2]."""
    freqs = rope.theta ** (-np.arange(0, head_width, 2) / head_width)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        # Llama 3.1: long waves are stretched by `factor`, short ones kept, those between are blended.
        wavelength = 2 * math.pi / freqs
        blend = rope.original_context / wavelength - rope.low_freq_factor
        blend = np.clip(blend / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return freqs * (blend + (1 - blend) / rope.factor)
    return freqs


def rotations(
    rope: Rope, head_width: int, positions: Int[Array, "B T"], dtype=jnp.float32
) -> tuple[Float[Array, "B T P"], Float[Array, "B T P"]]:
    """Returns cos and sin of every pair's angle at each position, P = Q/2, in at least float32."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    angles = positions[..., None].astype(dtype) * jnp.asarray(frequencies(rope, head_width), dtype)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T H Q"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"]
) -> Float[Array, "B T H Q"]:
    """Returns x with pair (i, i + Q/2) of each head turned by its angle."""
    a, b = jnp.split(at_least_float32(x), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
