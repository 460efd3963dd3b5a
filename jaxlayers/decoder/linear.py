"""A matrix product with an optional bias, whose weight carries its logical axes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Linear(nnx.Module):
    """x @ kernel + bias, kernel [in, out]."""

    def __init__(
        self, width: int, out: int, axes: tuple[str | None, str | None], *, bias: bool, rngs: nnx.Rngs
    ):
        kernel = jax.random.normal(rngs.params(), (width, out)) * width**-0.5
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = nnx.Param(jnp.zeros(out), axes=axes[1:]) if bias else None

    def __call__(self, x: Float[Array, "B T A"], out: DTypeLike | None = None) -> Float[Array, "B T C"]:
        """Returns the product in the kernel's dtype, or in at least `out` where a wider sum follows."""
        dtype = jnp.promote_types(self.kernel.dtype, out) if out else self.kernel.dtype
        y = jnp.dot(x, self.kernel[...], preferred_element_type=dtype)
        return y if self.bias is None else y + self.bias[...].astype(dtype)
