"""The public names; `jaxlayers` imports them from here at their first use."""

from jaxlayers.decoder.config import DecoderConfig, Rope
from jaxlayers.decoder.stack import Decoder, embed, init, layer_fn, layer_params, per_layer, unembed
from jaxlayers.evaluate import Evaluation, evaluate
from jaxlayers.execute.rows import Run, forward, run
from jaxlayers.generate.cache import Cache, new_cache
from jaxlayers.generate.decode import decode_step, generate, prefill, score
from jaxlayers.generate.sampling import Sampling
from jaxlayers.program import Program
from jaxlayers.weights.hub import Model, load

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Evaluation",
    "Model",
    "Program",
    "Rope",
    "Run",
    "Sampling",
    "decode_step",
    "embed",
    "evaluate",
    "forward",
    "generate",
    "init",
    "layer_fn",
    "layer_params",
    "load",
    "new_cache",
    "per_layer",
    "prefill",
    "run",
    "score",
    "unembed",
]
