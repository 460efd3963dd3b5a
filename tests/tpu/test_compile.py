"""Programs compiled for a TPU that is not attached: no weight and no cache is copied, and memory is a scan's.

Every program is data here. `scan` is the plain model as one `lax.scan` over its stacked layers: the least
that the compiler needs.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import abstract, bind, context
from jaxlayers.execute.rows import run
from jaxlayers.generate.cache import Cache, new_cache, read, write
from jaxlayers.program import Program
from jaxlayers.tpu import Compiled, compile_for

pytest.importorskip("libtpu", reason="libtpu is not installed, and only it compiles for TPU")
pytestmark = [pytest.mark.tpu, pytest.mark.slow]

LAYERS, EMBED, LENGTH = 8, 1024, 2304
CONFIG = DecoderConfig(vocab=8192, embed=EMBED, layers=LAYERS, heads=8, kv_heads=4, head_width=128, ffw=2816)
DECODER = abstract(CONFIG, jnp.bfloat16)
PLAIN, NEWTON = Program.parse("0-7", LAYERS), Program.parse("0,[1-4]@2,5-7", LAYERS)


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def empty(decoder, program, batch: int) -> Cache:
    return new_cache(decoder, program, batch, LENGTH, jnp.bfloat16)


def forward(decoder, program, h, positions):
    return run(decoder, h, program, positions).h


def prefill(decoder, program, h, positions):
    result = run(decoder, h, program, positions, empty(decoder, program, len(h)), fresh=True)
    return result.h, result.cache


def decode(decoder, program, h, positions, cache):
    result = run(decoder, h, program, positions, cache)
    return result.h, result.cache


def scan(decoder, h, positions, cache=None, fresh=False):
    """Returns h and the cache after the plain model."""
    past = cache is not None and not fresh
    shared = context(decoder, positions, cache.positions if past else None)

    def layer(carry, xs):
        h, kv = carry
        params, slot = xs
        module = bind(decoder, params)
        branch, new = module.attend(h, shared._replace(past=read(kv, slot) if past else None))
        h = h + branch
        return (h + module.feed(h), write(kv, new, slot, None if cache is None else cache.length)), None

    carry = (h, None if cache is None else cache.kv)
    (h, kv), _ = jax.lax.scan(layer, carry, (decoder.layers, jnp.arange(LAYERS)))
    return (h, None) if cache is None else (h, cache.appended(kv, positions))


def scan_prefill(decoder, h, positions):
    return scan(decoder, h, positions, empty(decoder, PLAIN, len(h)), fresh=True)


@functools.cache
def compiled(kind: str, program: Program | None, batch: int, length: int, topology: str) -> Compiled:
    """Returns forward, prefill or decode compiled for a program as data, or, without one, as a scan."""
    h = jax.ShapeDtypeStruct((batch, length, EMBED), jnp.float32)
    positions = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    if program is None:
        function = {"forward": scan, "prefill": scan_prefill, "decode": scan}[kind]
        args = [DECODER, h, positions]
    else:
        function = {"forward": forward, "prefill": prefill, "decode": decode}[kind]
        args = [DECODER, shapes(program), h, positions]
    if kind != "decode":
        return compile_for(function, *args, topology=topology)
    cache = jax.eval_shape(lambda: empty(DECODER, program or PLAIN, batch))
    return compile_for(function, *args, cache, topology=topology, donate=(len(args),))


def plainly(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of 1, in no order: a slice, a transpose and a copy look alike."""
    return tuple(sorted(d for d in shape if d > 1))


def copied_weights(found: Compiled) -> list:
    """Returns the arrays in HBM which look like a stacked weight, one layer of it, or several."""
    layer = {plainly(leaf.shape[1:]) for leaf in jax.tree.leaves(DECODER.layers) if leaf.ndim > 2}
    assert len(layer) == 3 and all(math.prod(shape) >= 1 << 16 for shape in layer)

    def like_weight(shape):
        rest = plainly(shape)
        return any(rest == one or rest == plainly((*one, n)) for one in layer for n in range(2, LAYERS + 1))

    return [array for array in found.materialised() if like_weight(array.shape)]


def copied_caches(found: Compiled, program: Program, batch: int) -> list[str]:
    """Returns the instructions which put a cache or one slot of it in HBM, but for updates in place."""
    slot = batch * CONFIG.kv_heads * LENGTH * CONFIG.head_width
    updates = set(re.findall(r"calls=(%\S+?)[,\s]", found.hlo))
    updates = {name for name in updates if _updates_in_place(found.hlo, name)}
    bad = []
    for line in found.hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* ([a-z][\w-]*)\(", line)
        if not match or match[2] in ("parameter", "get-tuple-element", "bitcast", "broadcast"):
            continue  # the broadcast fills a new cache
        size = math.prod(map(int, match[1].split(",")))
        calls = re.search(r"calls=(%\S+?)(?:,|\s|$)", line)
        in_place = match[2] == "dynamic-update-slice" or (calls and calls[1] in updates)
        if size in (slot, program.slots * slot) and not in_place and not _inside_fusion(found.hlo, line):
            bad.append(line.strip()[:160])
    return bad


def _computation(hlo: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)} \(.*?^}}", hlo, re.M | re.S)
    return found[0] if found else ""


def _updates_in_place(hlo: str, name: str) -> bool:
    return "dynamic-update-slice(" in _computation(hlo, name)


def _inside_fusion(hlo: str, line: str) -> bool:
    head = re.findall(r"^(%\S+|ENTRY %\S+) \(.*\{$", hlo[: hlo.index(line)], re.M)
    return bool(head) and "fused_computation" in head[-1]


CASES = [
    ("prefill", 4, 2048, "v5e:2x2"),
    ("decode", 4, 1, "v5e:2x2"),
    ("forward", 4, 2048, "v6e:2x2"),
    ("decode", 1, 1, "v6e:2x2"),
]


@pytest.mark.parametrize(("kind", "batch", "length", "topology"), CASES)
def test_a_program_as_data_needs_no_more_than_a_scan(kind, batch, length, topology):
    ours = compiled(kind, PLAIN, batch, length, topology)
    assert copied_weights(ours) == []
    assert copied_caches(ours, PLAIN, batch) == []
    scanned = compiled(kind, None, batch, length, topology)
    # A megabyte of slack, because the arrays of a scan over single tokens may fit in VMEM altogether.
    assert ours.temp_bytes <= 1.2 * scanned.temp_bytes + (1 << 20)


@pytest.mark.parametrize(("kind", "length"), [("forward", 256), ("decode", 1)])
def test_lanes_and_newton_rows_copy_no_weight_and_no_cache(kind, length):
    found = compiled(kind, NEWTON, 2, length, "v5e:2x2")
    assert copied_weights(found) == []
    assert copied_caches(found, NEWTON, 2) == []


def test_a_gathered_weight_and_a_copied_cache_are_seen():
    """The checks above see what they look for: weights gathered first, and a cache that is not donated."""

    def gathered(decoder, program, h, positions):
        layers = jax.tree.map(lambda a: a[program.layer[:, 0]], decoder.layers)
        return scan(decoder.__class__(decoder.embedding, layers, CONFIG, decoder.layer_type), h, positions)[0]

    h, positions = jax.ShapeDtypeStruct((1, 1, EMBED), jnp.float32), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    found = compile_for(gathered, DECODER, shapes(PLAIN), h, positions)
    assert copied_weights(found)
    cache = jax.eval_shape(lambda: empty(DECODER, PLAIN, 1))
    kept = compile_for(decode, DECODER, shapes(PLAIN), h, positions, cache)
    assert copied_caches(kept, PLAIN, 1)
