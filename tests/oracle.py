"""What a program means, stated a second time: a Python loop over branches, without `run` or the table."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from grammar import Step, steps

from jaxlayers.decoder.config import DecoderConfig, Rope
from jaxlayers.decoder.stack import (
    Decoder,
    bind,
    context,
    embed,
    init,
    layer_params,
    positions_of,
    unembed,
)

LAYERS = 5
# Windows that differ by layer, grouped heads, and a head width of its own.
WINDOWED = DecoderConfig(
    vocab=32,
    embed=16,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    head_width=6,
    ffw=24,
    windows=(None, 3, 5, None, 2),
)
# Norms of queries and keys, biases everywhere, one key head, a tied head, stretched RoPE.
BIASED = DecoderConfig(
    vocab=32,
    embed=16,
    layers=LAYERS,
    heads=3,
    kv_heads=1,
    head_width=4,
    ffw=20,
    rope=Rope(kind="llama3", factor=4.0, original_context=8),
    tied=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
)


def in_float64(test: Callable) -> Callable:
    """Runs a test with 64-bit types, and nothing after it."""

    @functools.wraps(test)
    def wrapped(*args, **kwargs):
        with jax.enable_x64(True):
            return test(*args, **kwargs)

    return wrapped


@functools.lru_cache
def decoder_of(config: DecoderConfig, dtype: str = "float64") -> Decoder:
    """Returns a decoder in which every leaf is random: norms and biases count too."""
    decoder = init(config, jax.random.key(0), dtype)
    leaves, tree = jax.tree.flatten(decoder)
    random = np.random.default_rng(1)
    return tree.unflatten([jnp.asarray(a + 0.3 * random.normal(size=a.shape), dtype) for a in leaves])


def batch(length: int = 9, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [3, length] and their mask: a full row, one padded left, one padded right."""
    tokens = np.random.default_rng(seed).integers(0, 32, (3, length)).astype(np.int32)
    mask = np.ones((3, length), bool)
    mask[1, : length // 2] = False
    mask[2, length - length // 3 :] = False
    return tokens, mask


@jax.jit
def _attend(decoder, params, x, ctx):
    return bind(decoder, params).attend(x, ctx)[0]


@jax.jit
def _feed(decoder, params, x):
    return bind(decoder, params).feed(x)


class Oracle:
    """The layers of a decoder as functions, and programs as loops over them."""

    def __init__(self, decoder: Decoder, positions: jax.Array):
        self.config = decoder.config
        ctx = context(decoder, positions)
        kinds, windows = decoder.config.window_kinds, decoder.config.windows
        self.contexts = [ctx._replace(window=kinds.index(window)) for window in windows]
        self.params = [layer_params(decoder, layer) for layer in range(decoder.config.layers)]
        # Only the static parts of the decoder are needed by `bind`, and its weights are not passed twice.
        self.frame = Decoder({}, {}, decoder.config, decoder.layer_type)

    def attend(self, layer: int, x: jax.Array) -> jax.Array:
        return _attend(self.frame, self.params[layer], x, self.contexts[layer])

    def feed(self, layer: int, x: jax.Array) -> jax.Array:
        return _feed(self.frame, self.params[layer], x)

    def residual(self, lane: list[tuple[int, str]], scale: float, x: jax.Array) -> jax.Array:
        """Returns what one lane adds to x: all its attentions, then all its MLPs on top of them."""
        added = sum((scale * self.attend(layer, x) for layer, branches in lane if "a" in branches), 0 * x)
        middle = x + added
        return sum((scale * self.feed(layer, middle) for layer, branches in lane if "m" in branches), added)

    def step(self, step: Step, h: jax.Array) -> list[jax.Array]:
        """Returns the residual stream after each iteration of a step."""
        scale = float(np.float32(step.scale))  # the table keeps scales in float32
        lanes = step.lanes
        if step.mean:
            return [h + sum(self.residual(lane, scale, h) for lane in lanes) / len(lanes)]
        ends, inputs = [], [h] * len(lanes)
        for _ in range(step.iterations):
            residuals = [self.residual(lane, scale, x) for lane, x in zip(lanes, inputs, strict=True)]
            inputs = [h]
            for residual in residuals:
                inputs.append(inputs[-1] + residual)
            ends.append(inputs.pop())
        return ends

    def states(self, text: str, h: jax.Array) -> list[jax.Array]:
        """Returns the residual stream before the program and after each of its rows."""
        states = [h]
        for step in steps(text):
            states += self.step(step, states[-1])
        return states


def states(decoder: Decoder, text: str, tokens: np.ndarray, mask: np.ndarray) -> list[jax.Array]:
    """Returns the residual streams of a full forward pass, before the program and after each row."""
    return Oracle(decoder, positions_of(jnp.asarray(mask))).states(text, embed(decoder, jnp.asarray(tokens)))


def logits(decoder: Decoder, text: str, tokens: np.ndarray, mask: np.ndarray) -> jax.Array:
    """Returns the logits of a full forward pass."""
    return unembed(decoder, states(decoder, text, tokens, mask)[-1])


def far(a: jax.Array, b: jax.Array, mask: np.ndarray | None = None) -> float:
    """Returns the largest difference, at real tokens [.., B, T, D], relative to the size of b beyond 1."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    if mask is not None:
        a, b = a[..., mask, :], b[..., mask, :]
    return float(np.abs(a - b).max(initial=0.0) / max(1.0, np.abs(b).max(initial=0.0)))
