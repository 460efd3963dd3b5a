"""One decoder layer as two pure branches."""

from flax import nnx
from jaxtyping import Array, Float

from jaxlayers.decoder.attention import Attention, Context, KeyValue
from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.mlp import Mlp
from jaxlayers.decoder.norm import RmsNorm


class DecoderLayer(nnx.Module):
    """A pre-norm transformer block; each branch holds its own norm.

    Whoever runs a layer adds the branches to the residual stream: skipped, side-by-side and scaled uses are
    sums outside the layer. Subclass it to change a branch, and hand the subclass to `init` or `Decoder`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RmsNorm(config.embed, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RmsNorm(config.embed, config.norm_eps)
        self.mlp = Mlp(config, rngs=rngs)

    def attend(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Returns the attention branch A(x) and the keys and values of the T tokens."""
        return self.attention(self.attention_norm(x), ctx)

    def feed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the MLP branch M(x)."""
        return self.mlp(self.mlp_norm(x))

    def __call__(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T D"]:
        """Returns the residual stream after the layer: m = x + A(x), then m + M(m)."""
        branch, _ = self.attend(x, ctx)
        x = x + branch
        return x + self.feed(x)
