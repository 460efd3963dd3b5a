"""How likely a text or a continuation is to a decoder under a program."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.stack import Decoder
from jaxlayers.execute.rows import forward
from jaxlayers.generate.decode import BUCKET, CAUSE, check_ids, check_prompts, right_padded
from jaxlayers.program import Program, as_program


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
    program: Program | str | None = None,
    window: int | None = None,
    batch: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Returns the mean negative log-likelihood of a text in consecutive windows.

    A window has 512 tokens by default, or the context where that is shorter. Each is scored from its own
    start: its first token is given, every other is predicted from those before it. `batch` windows run at
    once; `report(done, all)` is called after each batch. Raises ValueError for a window below 2 or beyond the
    context, an id outside the vocabulary, or a text of fewer than 2 tokens.
    """
    config = decoder.config
    window = min(512, config.context) if window is None else window
    if np.ndim(ids) != 1:
        raise ValueError(f"ids must be one sequence of token ids, not of {np.ndim(ids)} dimensions.")
    if not 2 <= window <= config.context:
        raise ValueError(f"window must be between 2 and the model's context {config.context}, not {window}.")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}.")
    check_ids(decoder, [ids], "the text")
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    predicted = sum(len(w) - 1 for w in windows)
    if predicted < 1:
        raise ValueError(f"the text has {len(ids)} tokens; at least 2 are needed to predict one.")
    program = as_program(program, config.layers)
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
        raise ValueError(f"program {program} gives a loss of {total}; {CAUSE}.")
    return Evaluation(float(total / predicted), len(ids))


@jax.jit
def token_nll(
    decoder: Decoder, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], program: Program
) -> Float[Array, "B T-1"]:
    """Returns -log p(token t+1 | tokens 0..t) in nats, and 0 where token t+1 is padding."""
    return jnp.where(mask[:, 1:], nll_of(forward(decoder, tokens, program, mask), tokens), 0)


def nll_of(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Returns -log p(token t+1) in nats by the logits of token t."""
    logprobs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def score(
    decoder: Decoder,
    prompt: Sequence[int],
    choices: Sequence[Sequence[int]],
    program: Program | str | None = None,
) -> Float[np.ndarray, " C"]:
    """Returns the log-likelihood, in nats, of each choice of ids as a continuation of the prompt's ids.

    Divide by the lengths of the choices to normalise by length. Raises ValueError for an empty prompt or
    choice, and for what does not fit the context.
    """
    if not len(choices) or not all(np.ndim(choice) == 1 and len(choice) for choice in choices):
        raise ValueError("every choice needs at least one token.")
    check_prompts(decoder, [prompt], max(map(len, choices)))
    program = as_program(program, decoder.config.layers)
    rows = [[*prompt, *choice] for choice in choices]
    check_ids(decoder, rows)
    tokens, mask = right_padded(rows, BUCKET)
    scored = np.zeros_like(mask)
    for row, choice in enumerate(choices):
        scored[row, len(prompt) : len(prompt) + len(choice)] = True
    nll = np.asarray(token_nll(decoder, tokens, mask, program))
    found = -np.where(scored[:, 1:], nll, 0).sum(axis=1)
    if not np.isfinite(found).all():
        raise ValueError(f"program {program} gives scores that are not finite; {CAUSE}.")
    return found
