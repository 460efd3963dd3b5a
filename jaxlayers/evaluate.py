"""How well a decoder predicts a text under a program."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.stack import Decoder
from jaxlayers.execute.rows import forward
from jaxlayers.generate.decode import check_ids, right_padded
from jaxlayers.program import Program, identity

BUCKET = 64  # short texts are padded to multiples of this, so that few shapes are compiled


class Evaluation(NamedTuple):
    """What a text costs a decoder."""

    mean_nll: float  # nats a predicted token
    tokens: int  # tokens read; the first of each window is not predicted

    @property
    def ppl(self) -> float:
        """Perplexity, exp(mean_nll)."""
        return math.exp(self.mean_nll) if self.mean_nll < 700 else math.inf


def evaluate(
    decoder: Decoder,
    ids: Sequence[int],
    program: Program | None = None,
    window: int = 512,
    batch: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Returns the mean negative log-likelihood of a text in consecutive windows.

    Each window is scored from its own start: its first token is given, every other is predicted from those
    before it in the window. `batch` windows run at once; `report(done, all)` is called after each batch.
    Raises ValueError for a window below 2 or beyond the context, an id outside the vocabulary, or a text of
    fewer than 2 tokens.
    """
    config = decoder.config
    if not 2 <= window <= config.context:
        raise ValueError(f"window must be between 2 and the model's context {config.context}, not {window}.")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}.")
    check_ids(decoder, [ids])
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    predicted = sum(len(w) - 1 for w in windows)
    if predicted < 1:
        raise ValueError(f"the text has {len(ids)} tokens; at least 2 are needed to predict one.")
    program = identity(config.layers) if program is None else program
    tokens, mask = right_padded(windows, min(BUCKET, window))
    total = 0.0
    for i in range(0, len(windows), batch):
        part = min(batch, len(windows))
        rows = slice(min(i, len(windows) - part), i + part)  # the last batch looks back, to keep its shape
        nll = np.asarray(token_nll(decoder, tokens[rows], mask[rows], program), np.float64)
        total += nll[i - rows.start :].sum()
        if report:
            report(min(rows.stop, len(windows)), len(windows))
    if not math.isfinite(total):
        raise ValueError(
            f"program {program} gives a loss of {total}; its scales or repeats overflow float32."
        )
    return Evaluation(total / predicted, len(ids))


@jax.jit
def token_nll(
    decoder: Decoder, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], program: Program
) -> Float[Array, "B T-1"]:
    """Returns -log p(token t+1 | tokens 0..t) in nats, and 0 where token t+1 is padding."""
    logprobs = jax.nn.log_softmax(forward(decoder, tokens, program, mask)[:, :-1], axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(mask[:, 1:], -chosen, 0)
