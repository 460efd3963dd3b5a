"""The gated feed-forward branch, SwiGLU (arXiv 2002.05202)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.linear import Linear


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, F, bias = config.embed, config.ffw, config.mlp_bias
        self.gate = Linear(D, F, ("embed", "ffw"), bias=bias, rngs=rngs)
        self.up = Linear(D, F, ("embed", "ffw"), bias=bias, rngs=rngs)
        self.down = Linear(F, D, ("ffw", "embed"), bias=bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns what the branch adds to the residual stream, in at least float32."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x), out=jnp.float32)
