"""The public names; `jaxlayers` imports them from here at their first use."""

from jaxlayers.decoder.config import DecoderConfig, Rope
from jaxlayers.decoder.layer import DecoderLayer
from jaxlayers.decoder.stack import (
    Decoder,
    context,
    embed,
    init,
    layer_fn,
    layer_params,
    per_layer,
    positions_of,
    unembed,
)
from jaxlayers.evaluate import Evaluation, evaluate, score
from jaxlayers.execute.rows import Run, forward, run
from jaxlayers.generate.cache import Cache, new_cache
from jaxlayers.generate.decode import decode_step, generate, prefill
from jaxlayers.generate.sampling import Sampling
from jaxlayers.program import Program
from jaxlayers.weights.export import export
from jaxlayers.weights.hub import Model, load
from jaxlayers.weights.tokenizer import Tokenizer

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "Evaluation",
    "Model",
    "Program",
    "Rope",
    "Run",
    "Sampling",
    "Tokenizer",
    "context",
    "decode_step",
    "embed",
    "evaluate",
    "export",
    "forward",
    "generate",
    "init",
    "layer_fn",
    "layer_params",
    "load",
    "new_cache",
    "per_layer",
    "positions_of",
    "prefill",
    "run",
    "score",
    "unembed",
]
