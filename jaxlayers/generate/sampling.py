"""Choosing the next token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "seed"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; data under jit, so that a change needs no compilation.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off; they apply in this order, each on
    what the ones before left, as in transformers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | np.uint32 = 0

    def checked(self) -> "Sampling":
        """Returns the settings as jit takes them, or raises ValueError naming one that is out of range."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or above and finite, not {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or above, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}.")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be at least 0 (off) and below 1, not {self.min_p}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 4294967295, not {self.seed}.")
        # jit takes a Python int for an int32, which neither a large seed nor "all of them" need be.
        return dataclasses.replace(self, top_k=min(self.top_k, 2**31 - 1), seed=np.uint32(self.seed))


def sample(logits: Float[Array, "B V"], sampling: Sampling, positions: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns a token for each row.

    `positions` are those of the tokens drawn. The key of a draw is made of seed, row and position, so neither
    the batch around it nor the number of tokens a call makes changes it.
    """
    return jax.lax.cond(
        sampling.temperature > 0,
        lambda: _draw(logits, sampling, positions),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )


def _draw(logits: Float[Array, "B V"], sampling: Sampling, positions: Int[Array, " B"]) -> Int[Array, " B"]:
    rows, vocab = logits.shape
    order = jnp.argsort(-logits, axis=-1)
    top = jnp.take_along_axis(logits, order, axis=-1) / jnp.maximum(sampling.temperature, 1e-6)
    keep = jnp.arange(vocab) < jnp.where(sampling.top_k > 0, sampling.top_k, vocab)
    probs = jax.nn.softmax(jnp.where(keep, top, -jnp.inf), axis=-1)
    # A token stays while those before it hold less than top_p: the first always does.
    before = jnp.cumsum(probs, axis=-1) - probs
    keep &= (before < sampling.top_p) | (sampling.top_p >= 1)
    keep &= probs >= sampling.min_p * probs[:, :1]
    key = jax.random.key(sampling.seed)
    row_key = jax.vmap(lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position))
    draw = jax.vmap(jax.random.categorical)(
        row_key(jnp.arange(rows), positions), jnp.where(keep, top, -jnp.inf)
    )
    return jnp.take_along_axis(order, draw[:, None], axis=-1)[:, 0].astype(jnp.int32)
