"""The decoder as one pytree: an embedding, and every layer stacked along a leading axis."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxlayers.decoder.attention import Context
from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.layer import DecoderLayer
from jaxlayers.decoder.norm import RmsNorm
from jaxlayers.decoder.rope import rotations

Params = Any  # a nested dict of arrays


class Embedding(nnx.Module):
    """Both ends of a decoder: the token table, and the final norm with the head."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        V, D = config.vocab, config.embed
        self.table = nnx.Param(jax.random.normal(rngs.params(), (V, D)) * 0.02, axes=("vocab", "embed"))
        self.norm = RmsNorm(D, config.norm_eps)
        head = lambda: nnx.Param(jax.random.normal(rngs.params(), (V, D)) * D**-0.5, axes=("vocab", "embed"))
        self.head = None if config.tied else head()

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns the residual stream before the first layer, in at least float32."""
        rows = self.table[...].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))

    def unembed(self, h: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Returns logits in at least float32."""
        head = self.table[...] if self.head is None else self.head[...]
        wide = jnp.promote_types(head.dtype, jnp.float32)
        # The head keeps the checkpoint's [V, D]: contracting the last axes is fast for one token and for
        # many, and a tied table needs no second copy.
        return jnp.einsum("...d,vd->...v", self.norm(h), head, preferred_element_type=wide)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["embedding", "layers"],
    meta_fields=["config", "layer_type"],
)
@dataclasses.dataclass(frozen=True)
class Decoder:
    """Weights of a decoder LM and what they are.

    `layers` is one tree whose leaves have the layer axis first, or, in the form that `per_layer` returns, a
    tuple with one tree a layer. Every public function takes either.
    """

    embedding: Params
    layers: Params
    config: DecoderConfig
    layer_type: type[DecoderLayer] = DecoderLayer

    def __repr__(self) -> str:
        leaves = jax.tree.leaves((self.embedding, self.layers))
        sizes = [math.prod(getattr(leaf, "shape", ())) for leaf in leaves]
        form = "per layer" if isinstance(self.layers, tuple) else "stacked"
        return (
            f"Decoder({self.config.family}, {self.config.layers} layers {form}, {sum(sizes):,} weights of "
            f"{getattr(leaves[0], 'dtype', type(leaves[0]).__name__)})"
        )


@functools.lru_cache(maxsize=64)
def _split(layer_type: type, config: DecoderConfig, layers: int | None) -> tuple[Any, Any, Any]:
    """Returns the graph definition of a module, its abstract parameters and their logical axes."""

    def make(rngs):
        return layer_type(config, rngs=rngs)

    if layers is not None:
        make = nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=0, out_axes=0))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    named = jax.tree.map(
        lambda p: p.get_metadata("axes"), state, is_leaf=lambda p: isinstance(p, nnx.Variable)
    )
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(named)


def bind(decoder: Decoder, params: Params) -> DecoderLayer:
    """Returns the layer module that holds the parameters of one layer."""
    return nnx.merge(_split(decoder.layer_type, decoder.config, None)[0], params)


def layer_fn(decoder: Decoder) -> Callable[[Params, Float[Array, "B T D"], Context], Float[Array, "B T D"]]:
    """Returns the pure function (parameters of one layer, residual stream, context) -> residual stream.

    `layer_params` gives the parameters and `context` the context; `context(...)._replace(window=...)` sets
    the layer's own window where they differ.
    """
    return lambda params, h, ctx: bind(decoder, params)(h, ctx)


def layer_params(decoder: Decoder, index: int) -> Params:
    """Returns the parameters of one layer; raises IndexError outside 0..L-1."""
    if not 0 <= index < decoder.config.layers:
        raise IndexError(f"layer {index} is outside 0..{decoder.config.layers - 1}.")
    if isinstance(decoder.layers, tuple):
        return decoder.layers[index]
    return jax.tree.map(lambda a: a[index], decoder.layers)


def at_layer(layers: Params, index: Int[Array, ""], function: Callable[[Params], Any]) -> Any:
    """Returns function(parameters of one layer), picked by a traced index: the one place that picks a layer.

    Stacked layers are indexed, which the TPU compiler fuses into the matmuls. A per-layer tuple is switched
    over, which copies no weight on CPU.
    """
    if isinstance(layers, tuple):
        return jax.lax.switch(index, [lambda p=p: function(p) for p in layers])
    pick = lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False)
    return function(jax.tree.map(pick, layers))


def per_layer(decoder: Decoder) -> Decoder:
    """Returns the decoder with its layers as a tuple, one tree a layer.

    On CPU the arrays are views of the stacked ones where alignment allows, so nothing is copied. Indexing a
    stacked weight copies it there, which costs as much as using it for a single token.
    """
    if isinstance(decoder.layers, tuple):
        return decoder

    def rows(a: jax.Array) -> list[jax.Array]:
        (device, *others) = a.devices()
        if device.platform == "cpu" and not others:
            return [jax.device_put(row, device) for row in np.asarray(a)]  # jnp.asarray would copy
        return list(a)

    leaves, tree = jax.tree.flatten(decoder.layers)
    layers = tuple(tree.unflatten(row) for row in zip(*map(rows, leaves), strict=True))
    return dataclasses.replace(decoder, layers=layers)


def fastest_form(decoder: Decoder) -> Decoder:
    """Returns the decoder in the form that runs fastest here: `per_layer` on one CPU device, else stacked."""
    devices = jax.tree.leaves(decoder.embedding)[0].devices()
    on_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return per_layer(decoder) if on_cpu else decoder


def context(
    decoder: Decoder,
    positions: Int[Array, "B T"],
    past_positions: Int[Array, "B S"] | None = None,
    branch: Int[Array, "B T"] | None = None,
) -> Context:
    """Returns what every layer's attention shares; positions of -1 mark padding.

    Where `branch` is given, a token sees earlier ones of branch 0 and of its own branch.
    """
    config = decoder.config
    dtype = jax.tree.leaves(decoder.embedding)[0].dtype
    cos, sin = rotations(config.rope, config.head_width, jnp.maximum(positions, 0), dtype)
    return Context(positions, cos, sin, branch=branch, past_positions=past_positions)


def window_indices(config: DecoderConfig) -> Int[Array, " L"]:
    """Returns each layer's index into config.window_kinds."""
    return jnp.asarray([config.window_kinds.index(w) for w in config.windows], jnp.int32)


def positions_of(mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the position of each real token in its row, and -1 at padding."""
    return jnp.where(mask, jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, -1)


def _embedding(decoder: Decoder) -> Embedding:
    return nnx.merge(_split(Embedding, decoder.config, None)[0], decoder.embedding)


def embed(decoder: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the residual stream before the first layer; an id outside the vocabulary gives NaN."""
    return _embedding(decoder).embed(tokens)


def unembed(decoder: Decoder, h: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Returns the logits of a residual stream: final norm, then head."""
    return _embedding(decoder).unembed(h)


def last_logits(decoder: Decoder, h: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B V"]:
    """Returns the logits that follow each row's last real token."""
    last = h.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return unembed(decoder, jnp.take_along_axis(h, last[:, None, None], axis=1)[:, 0])


def abstract(
    config: DecoderConfig, dtype: DTypeLike = jnp.float32, layer_type: type[DecoderLayer] = DecoderLayer
) -> Decoder:
    """Returns a decoder of jax.ShapeDtypeStruct: what loading, sharding and compiling ahead of time need."""
    cast = lambda a: jax.ShapeDtypeStruct(a.shape, dtype)
    embedding = jax.tree.map(cast, _split(Embedding, config, None)[1])
    layers = jax.tree.map(cast, _split(layer_type, config, config.layers)[1])
    return Decoder(embedding, layers, config, layer_type)


def logical_axes(config: DecoderConfig, layer_type: type[DecoderLayer] = DecoderLayer) -> Decoder:
    """Returns a decoder whose leaves are tuples of logical axis names, `layer` first in the stack."""
    layers = jax.tree.map(
        lambda axes: ("layer", *axes),
        _split(layer_type, config, None)[2],
        is_leaf=lambda axes: isinstance(axes, tuple),
    )
    return Decoder(_split(Embedding, config, None)[2], layers, config, layer_type)


def init(
    config: DecoderConfig,
    key: PRNGKeyArray,
    dtype: DTypeLike = jnp.float32,
    layer_type: type[DecoderLayer] = DecoderLayer,
) -> Decoder:
    """Returns a decoder with random weights."""
    ends, stack = jax.random.split(key)

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(rngs):
        return layer_type(config, rngs=rngs)

    embedding = nnx.to_pure_dict(nnx.state(Embedding(config, rngs=nnx.Rngs(params=ends))))
    stacked = nnx.to_pure_dict(nnx.state(layers(nnx.Rngs(params=stack))))
    cast = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)
    return Decoder(cast(embedding), cast(stacked), config, layer_type)
