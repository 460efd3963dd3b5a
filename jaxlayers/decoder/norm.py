"""Root-mean-square norm (arXiv 1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def at_least_float32(x: jax.Array) -> jax.Array:
    """Returns x in float32, or in float64 where it already is: the precision of norms, softmax and sums."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class RmsNorm(nnx.Module):
    """Scales the last axis to unit root mean square, then by a learned weight; computed in float32."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns the normed x in the dtype of the weight, which is the dtype the next matmul computes in."""
        wide = at_least_float32(x)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * at_least_float32(self.scale[...])).astype(self.scale.dtype)
