"""Logical axes onto a mesh of eight fake devices, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import abstract, init
from jaxlayers.execute.rows import forward
from jaxlayers.mesh import AXES, RULES, make_mesh, sharding_of, shardings

CONFIG = DecoderConfig(vocab=16, embed=8, layers=2, heads=4, kv_heads=2, head_width=4, ffw=12, qkv_bias=True)


def test_axes_are_always_the_same_and_auto():
    assert len(jax.devices()) == 8
    cases: list[dict[str, Any]] = [
        {},
        dict(fsdp=8),
        dict(replica=2, tensor=2),
        dict(sequence=2, lane=2, fsdp=2),
    ]
    for sizes in cases:
        mesh = make_mesh(**sizes)
        assert mesh.axis_names == AXES
        assert mesh.size == 8
        assert mesh.axis_types == (AxisType.Auto,) * 5
    assert dict(make_mesh(replica=2, tensor=2).shape) == dict(replica=2, fsdp=2, sequence=1, tensor=2, lane=1)
    assert make_mesh(devices=jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    "sizes, needle",
    [
        (dict(fsdp=3), "need 3 devices and there are 8"),
        (dict(tensor=3), "need 6 devices"),
        (dict(tensor=16), "need 16 devices"),
        (dict(tensor=0), "tensor must be a whole number"),
        (dict(fsdp=True), "fsdp must be a whole number"),
        (dict(lane=2.0), "lane must be a whole number"),
    ],
)
def test_sizes_that_do_not_fit(sizes, needle):
    with pytest.raises(ValueError, match=needle):
        make_mesh(**sizes)


def test_every_weight_has_a_place():
    mesh = make_mesh(fsdp=4, tensor=2)
    placed = shardings(CONFIG, mesh)
    spec = lambda x: x.spec
    assert spec(placed.embedding["table"]) == PartitionSpec("tensor", "fsdp")
    assert spec(placed.embedding["norm"]["scale"]) == PartitionSpec(None)
    assert spec(placed.layers["attention"]["q"]["kernel"]) == PartitionSpec(None, "fsdp", "tensor")
    assert spec(placed.layers["attention"]["q"]["bias"]) == PartitionSpec(None, "tensor")
    assert spec(placed.layers["attention"]["out"]["kernel"]) == PartitionSpec(None, "tensor", "fsdp")
    assert spec(placed.layers["mlp"]["down"]["kernel"]) == PartitionSpec(None, "tensor", "fsdp")
    assert spec(sharding_of(("batch", "length"), mesh)) == PartitionSpec(("replica", "fsdp"), "sequence")
    assert jax.tree.structure(placed) == jax.tree.structure(abstract(CONFIG))


def test_a_pod_needs_no_devices():
    mesh = AbstractMesh((1, 16, 1, 16, 1), AXES, axis_types=(AxisType.Auto,) * 5)
    config = dataclasses.replace(CONFIG, vocab=256, embed=64, heads=32, kv_heads=16, ffw=128)
    assert shardings(config, mesh).layers["mlp"]["up"]["kernel"].shard_shape((2, 64, 128)) == (2, 4, 8)


@pytest.mark.parametrize("sizes", [dict(fsdp=8), dict(fsdp=2, tensor=2, replica=2), dict(fsdp=4, tensor=2)])
def test_sharded_weights_give_the_same_logits(sizes):
    decoder = init(CONFIG, jax.random.key(0))
    mesh = make_mesh(**sizes)
    placed = jax.device_put(decoder, shardings(CONFIG, mesh))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (8, 6)))
    spread = jax.device_put(tokens, sharding_of(("batch", "length"), mesh, shape=tokens.shape))
    run = jax.jit(forward)
    np.testing.assert_allclose(run(placed, spread), run(decoder, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes, sizes, needle",
    [
        (dict(heads=6, kv_heads=3), dict(tensor=2), "kv_heads 3 cannot be split over 2"),
        (dict(heads=6, kv_heads=1, head_width=8), dict(tensor=4), "heads 6 cannot be split over 4"),
        (dict(embed=12), dict(fsdp=8), "'embed' of embedding.* has size 12, which 8 shards"),
        (dict(vocab=15), dict(tensor=2), "'vocab' of embedding.* has size 15"),
        (dict(ffw=11), dict(tensor=2), "'ffw' of layers.mlp.* has size 11"),
    ],
)
def test_sizes_that_do_not_divide(changes, sizes, needle):
    with pytest.raises(ValueError, match=needle):
        shardings(dataclasses.replace(CONFIG, **changes), make_mesh(**sizes))


def test_two_axes_on_one_mesh_axis():
    mesh = make_mesh(fsdp=4, tensor=2)
    with pytest.raises(ValueError, match=r"'vocab' and 'embed' of .* are both on mesh axis 'tensor'"):
        shardings(CONFIG, mesh, {**RULES, "embed": "tensor"})
    with pytest.raises(ValueError, match="'batch' and 'embed' of array are both on mesh axis 'fsdp'"):
        sharding_of(("batch", "length", "embed"), mesh)


def test_rules_that_name_nothing():
    mesh = make_mesh()
    with pytest.raises(ValueError, match="'experts' of array has no rule"):
        sharding_of(("experts",), mesh)
    with pytest.raises(ValueError, match="'data', which is no axis"):
        sharding_of(("batch",), mesh, {**RULES, "batch": "data"})
