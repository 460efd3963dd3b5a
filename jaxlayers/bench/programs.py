"""What it costs that a program is data, and what a shorter program saves."""

import jax
import numpy as np

from jaxlayers.bench.timing import duel
from jaxlayers.decoder.stack import (
    Decoder,
    bind,
    context,
    embed,
    fastest_form,
    layer_params,
    per_layer,
    positions_of,
    unembed,
)
from jaxlayers.execute.rows import run
from jaxlayers.generate.cache import Cache, new_cache, read, write
from jaxlayers.generate.decode import decode_step, prefill
from jaxlayers.program import Program, identity
from jaxlayers.weights.hub import load

TOKENS = 512


def bench_programs(model: str) -> dict:
    """Returns the cost of half the visits over all, and of programs as data over ones fixed at trace time.

    `half_cost` times the layers alone, without embedding and head. `data_over_fixed` is prefill, and
    `decode_data_over_fixed` one token, each against the same layers unrolled over per-layer arrays when the
    function is traced.
    """
    decoder = load(model, dtype="float32").decoder
    L = decoder.config.layers
    form = fastest_form(decoder)
    ids = np.random.default_rng(0).integers(0, decoder.config.vocab, (1, TOKENS))
    positions = positions_of(np.ones((1, TOKENS), bool))
    h = embed(decoder, ids)
    whole = identity(L)
    half = Program.parse(f"0-{L // 2 - 1}", L).pad(L, 1, L)
    layers = jax.jit(lambda decoder, h, program: run(decoder, h, program, positions).h)
    halved = duel(lambda: layers(form, h, whole), lambda: layers(form, h, half))

    fill = jax.jit(prefill)
    fixed_fill = jax.jit(lambda decoder, ids: unrolled(decoder, ids, None))
    views = per_layer(decoder)
    filled = duel(lambda: fill(form, ids, whole), lambda: fixed_fill(views, ids))

    _, cache = jax.jit(prefill, static_argnames="length")(form, ids[:, :64], whole, length=128)
    token = ids[:, 64]
    step = jax.jit(decode_step)
    fixed_step = jax.jit(lambda decoder, token, cache: unrolled(decoder, token[:, None], cache))
    decoded = duel(
        lambda: step(form, token, cache, whole), lambda: fixed_step(views, token, cache), rounds=15
    )
    report = lambda d: {"data_seconds": d.ours, "fixed_seconds": d.other}
    return {
        "ratio": filled.ratio,
        "half_cost": halved.ratio,
        "data_over_fixed": 1 / filled.ratio,
        "decode_data_over_fixed": 1 / decoded.ratio,
        "compared": f"float32, {TOKENS} tokens: all {L} visits and {L // 2}; prefill and decode of one token "
        "under a program as data and unrolled over per-layer arrays at trace time",
        "layers": {"all_seconds": halved.ours, "half_seconds": halved.other},
        "prefill": report(filled),
        "decode": report(decoded),
    }


def unrolled(decoder: Decoder, ids, cache: Cache | None):
    """Returns the logits after the last token and the cache: each layer once, in order, as Python would."""
    B, T = ids.shape
    fresh = cache is None
    cache = new_cache(decoder, identity(decoder.config.layers), B, T) if cache is None else cache
    positions = cache.next_positions(np.ones((B, T), bool))
    shared = context(decoder, positions, None if fresh else cache.positions)
    kv, h = cache.kv, embed(decoder, ids)
    for i, window in enumerate(decoder.config.windows):
        layer = bind(decoder, layer_params(decoder, i))
        ctx = shared._replace(
            window=decoder.config.window_kinds.index(window), past=None if fresh else read(kv, i)
        )
        branch, new = layer.attend(h, ctx)
        kv = write(kv, new, i, cache.length)
        h = h + branch
        h = h + layer.feed(h)
    return unembed(decoder, h[:, -1]), cache.appended(kv, positions)
