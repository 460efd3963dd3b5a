"""The loss of a text in windows, against a plain loop."""

import math

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlayers.decoder.stack import per_layer
from jaxlayers.evaluate import Evaluation, evaluate
from jaxlayers.execute.rows import forward
from jaxlayers.program import Program

DECODER = checkpoints.model(1).decoder
PROGRAM = Program.parse("0,[1-2]@2,3,1", 4)
IDS = np.random.default_rng(0).integers(0, 267, 150).tolist()


@jax.jit
def logits_of(decoder, tokens, program):
    return forward(decoder, tokens, program)


def loop(ids, window, program):
    losses = []
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        tokens = np.zeros((1, 256), np.int32)
        tokens[0, : len(part)] = part
        logits = np.asarray(logits_of(DECODER, jnp.asarray(tokens), program), np.float64)[0]
        for i in range(len(part) - 1):
            row = logits[i]
            losses.append(row.max() + np.log(np.exp(row - row.max()).sum()) - row[part[i + 1]])
    return float(np.mean(losses))


# 150 tokens: one window, whole windows, a last window of one token, and of some.
@pytest.mark.parametrize("window", [256, 150, 75, 149, 64, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_windows_are_scored_from_their_own_start(window, batch):
    found = evaluate(DECODER, IDS, PROGRAM, window, batch)
    assert found.tokens == 150
    assert found.mean_nll == pytest.approx(loop(IDS, window, PROGRAM), abs=1e-4)
    assert found.ppl == pytest.approx(math.exp(found.mean_nll))


def test_the_form_of_the_layers_does_not_matter():
    assert evaluate(per_layer(DECODER), IDS, window=64).mean_nll == pytest.approx(
        evaluate(DECODER, IDS, window=64).mean_nll, abs=1e-5
    )


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_batch_is_reported(batch):
    seen = []
    evaluate(DECODER, IDS, window=50, batch=batch, report=lambda done, all: seen.append((done, all)))
    assert seen == {1: [(1, 3), (2, 3), (3, 3)], 2: [(2, 3), (3, 3)], 5: [(3, 3)]}[batch]


@pytest.mark.parametrize(
    "ids, settings, match",
    [
        (IDS, {"window": 0}, "window must be between 2 and the model's context 256, not 0"),
        (IDS, {"window": 257}, "not 257"),
        (IDS, {"batch": 0}, "batch must be at least 1"),
        ([], {}, "has 0 tokens"),
        ([3], {}, "has 1 tokens"),
        ([3, 999], {}, "id 999"),
        (IDS, {"program": Program.parse("0-3*1e38", 4)}, "overflow"),
    ],
)
def test_wrong_input_is_named(ids, settings, match):
    with pytest.raises(ValueError, match=match):
        evaluate(DECODER, ids, **{"window": 64, **settings})


def test_a_perplexity_beyond_floats_is_infinite():
    assert Evaluation(1e4, 2).ppl == math.inf
