"""64 greedy tokens after 64, prompt included, against transformers' generate."""

import numpy as np

from jaxlayers.bench.timing import duel
from jaxlayers.bench.transformers_side import THREADS, transformers_model
from jaxlayers.generate.decode import generate
from jaxlayers.weights.hub import load

PROMPT = 64
NEW = 64


def bench_decode(model: str) -> dict:
    """Returns the time of transformers over ours for prefill and decode, and both in seconds."""
    import torch

    decoder = load(model, dtype="float32").decoder
    other = transformers_model(decoder)
    prompt = np.random.default_rng(0).integers(0, decoder.config.vocab, PROMPT)

    def ours():
        blocks = generate(decoder, [prompt.tolist()], max_tokens=NEW, block=NEW)
        return [token for block in blocks for token in block[0]]

    def theirs():
        ids = torch.from_numpy(prompt)[None]
        with torch.inference_mode():
            out = other.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=NEW,
                max_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, PROMPT:].tolist()

    same = ours() == theirs()
    result = duel(ours, theirs, rounds=5)
    return {
        "ratio": result.ratio,
        "ours_seconds": result.ours,
        "other_seconds": result.other,
        "compared": f"{NEW} greedy tokens after {PROMPT}, float32: jaxlayers and transformers' generate "
        f"(torch, {THREADS} threads)",
        "same_tokens": same,
    }
