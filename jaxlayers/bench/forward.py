"""One forward pass over 512 tokens, all logits returned, against transformers."""

import jax
import numpy as np

from jaxlayers.bench.timing import duel
from jaxlayers.bench.transformers_side import THREADS, transformers_model
from jaxlayers.decoder.stack import fastest_form
from jaxlayers.execute.rows import forward
from jaxlayers.program import identity
from jaxlayers.weights.hub import load

TOKENS = 512


def bench_forward(model: str) -> dict:
    """Returns the time of transformers over ours for one forward pass, and both in seconds."""
    import torch

    decoder = load(model, dtype="float32").decoder
    other = transformers_model(decoder)
    ids = np.random.default_rng(0).integers(0, decoder.config.vocab, (1, TOKENS))
    program, step, form = identity(decoder.config.layers), jax.jit(forward), fastest_form(decoder)

    def theirs():
        with torch.inference_mode():
            return other(torch.from_numpy(ids), use_cache=False).logits.numpy()

    ours = lambda: step(form, ids, program)
    difference = float(np.abs(np.asarray(ours()) - theirs()).max())
    result = duel(ours, theirs)
    return {
        "ratio": result.ratio,
        "ours_seconds": result.ours,
        "other_seconds": result.other,
        "compared": f"forward over {TOKENS} tokens, float32, all logits: jaxlayers and transformers "
        f"(torch, {THREADS} threads)",
        "largest_logit_difference": difference,
    }
