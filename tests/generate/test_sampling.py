"""Drawing tokens, against a plain numpy reference and the warpers of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlayers.generate.sampling import Sampling, sample

LOGITS = np.random.default_rng(3).permutation(np.linspace(-1.5, 2.5, 12)).astype(np.float32)
SETTINGS = [
    Sampling(1.0),
    Sampling(0.5),
    Sampling(2.0),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=4),
    Sampling(1.0, top_k=500),
    Sampling(1.0, top_p=0.7),
    Sampling(1.0, top_p=0.05),
    Sampling(1.0, min_p=0.2),
    Sampling(0.8, top_k=6, top_p=0.8),
    Sampling(1.5, top_k=8, top_p=0.9, min_p=0.25),
    Sampling(0.7, top_p=0.9, min_p=0.1),
]


def reference(logits, s: Sampling):
    """The distribution of a draw: tokens from the likeliest down, each filter on what the one before left."""
    order = np.argsort(-logits)
    scores = logits[order].astype(np.float64) / s.temperature
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    scores = scores[: s.top_k or None]
    if s.top_p < 1:
        enough = np.cumsum(softmax(scores)) >= s.top_p
        scores = scores[: 1 + int(np.argmax(enough))]
    probs = softmax(scores)
    scores = scores[probs >= s.min_p * probs[0]]
    result = np.zeros(len(logits))
    result[order[: len(scores)]] = softmax(scores)
    return result


def draws(settings: Sampling, count: int, logits=LOGITS):
    """Draws at positions 0..count-1 of 64 rows."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (64, len(logits)))
    at = lambda position: sample(rows, settings.checked(), jnp.full(64, position, jnp.int32))
    return np.asarray(jax.jit(jax.vmap(at))(jnp.arange(count))).ravel()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_filtered_distribution(settings):
    expected = reference(LOGITS, settings)
    drawn = draws(settings, 200)
    frequencies = np.bincount(drawn, minlength=len(LOGITS)) / len(drawn)
    assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(expected))
    assert set(np.flatnonzero(expected > 1e-3)) <= set(np.flatnonzero(frequencies))
    np.testing.assert_allclose(frequencies, expected, atol=0.02)  # five standard deviations of 12,800 draws


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_reference_is_what_transformers_does(settings):
    torch = pytest.importorskip("torch", reason="the warpers of transformers need torch")
    process = pytest.importorskip("transformers.generation.logits_process", reason="needs transformers")
    scores = torch.tensor(LOGITS[None])
    warpers = [process.TemperatureLogitsWarper(settings.temperature)]
    warpers += [process.TopKLogitsWarper(settings.top_k)] if settings.top_k else []
    warpers += [process.TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
    warpers += [process.MinPLogitsWarper(settings.min_p)] if settings.min_p else []
    for warp in warpers:
        scores = warp(None, scores)
    np.testing.assert_allclose(scores.softmax(-1)[0].numpy(), reference(LOGITS, settings), atol=1e-6)


def test_greedy_takes_the_first_of_the_largest():
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 1.0, 1.0]])
    assert sample(logits, Sampling().checked(), jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


def test_a_low_temperature_is_greedy_and_a_high_one_is_uniform():
    assert set(draws(Sampling(1e-300), 4)) == {int(np.argmax(LOGITS))}
    frequencies = np.bincount(draws(Sampling(1e30), 200), minlength=12) / 12_800
    np.testing.assert_allclose(frequencies, 1 / 12, atol=0.015)


def test_a_draw_depends_on_seed_row_and_position_only():
    rows = lambda n: jnp.broadcast_to(jnp.asarray(LOGITS), (n, 12))
    jitted = jax.jit(sample)
    draw = lambda n, seed, position: jitted(
        rows(n), Sampling(1.0, seed=seed).checked(), jnp.full(n, position, jnp.int32)
    ).tolist()
    assert draw(40, 1, 7)[:9] == draw(9, 1, 7)
    assert draw(40, 1, 7) != draw(40, 1, 8)
    assert draw(40, 1, 7) != draw(40, 2, 7)
    assert len(set(draw(40, 1, 7))) > 5


@pytest.mark.parametrize(
    "settings, name",
    [
        (Sampling(-1.0), "temperature"),
        (Sampling(float("nan")), "temperature"),
        (Sampling(float("inf")), "temperature"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(top_p=float("nan")), "top_p"),
        (Sampling(min_p=1.0), "min_p"),
        (Sampling(min_p=-0.1), "min_p"),
        (Sampling(seed=-1), "seed"),
        (Sampling(seed=2**32), "seed"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(settings, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        settings.checked()


def test_the_largest_settings_are_taken():
    jitted = jax.jit(sample)
    everything = Sampling(1.0, top_k=10**12, seed=2**32 - 1).checked()
    assert 0 <= int(jitted(jnp.asarray(LOGITS[None]), everything, jnp.zeros(1, jnp.int32))[0]) < 12
