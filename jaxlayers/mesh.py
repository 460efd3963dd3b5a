"""Logical axes of arrays onto the axes of a device mesh."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import Decoder, abstract, logical_axes

AXES = ("replica", "fsdp", "sequence", "tensor", "lane")
Rules = Mapping[str, str | tuple[str, ...] | None]  # logical axis -> mesh axis or axes

RULES: Rules = {
    "layer": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv": "tensor",
    "ffw": "tensor",
    "batch": ("replica", "fsdp"),
    "length": "sequence",
}


def make_mesh(
    replica: int = 1,
    fsdp: int | None = None,
    sequence: int = 1,
    tensor: int = 1,
    lane: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Returns a mesh of the five axes, all Auto; `fsdp` None takes the devices that the others leave.

    Raises ValueError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    others = {"replica": replica, "sequence": sequence, "tensor": tensor, "lane": lane}
    for name, size in {**others, "fsdp": 1 if fsdp is None else fsdp}.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {name} must be a whole number of at least 1, not {size!r}.")
    if fsdp is None:
        fsdp = max(len(devices) // math.prod(others.values()), 1)
    shape = (replica, fsdp, sequence, tensor, lane)
    if math.prod(shape) != len(devices):
        sizes = ", ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh axes {sizes} need {math.prod(shape)} devices and there are {len(devices)}.")
    # jax.make_mesh orders the devices along the interconnect of a slice.
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def sharding_of(
    axes: Sequence[str | None],
    mesh: Mesh | AbstractMesh,
    rules: Rules = RULES,
    shape: Sequence[int] | None = None,
    name: str = "array",
) -> NamedSharding:
    """Returns where an array with these logical axes lives; with `shape`, that it divides evenly is checked.

    Raises ValueError for an axis without a rule, a rule that names no axis of the mesh, two axes of one
    array on one mesh axis, or a dimension that its mesh axes do not divide.
    """
    taken: dict[str, str] = {}
    spec = []
    for position, axis in enumerate(axes):
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} of {name} has no rule; rules are {sorted(rules)}.")
        rule = None if axis is None else rules[axis]
        parts = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
        for part in parts:
            if part not in mesh.shape:
                raise ValueError(
                    f"the rule of {axis!r} names {part!r}, which is no axis of {mesh.axis_names}."
                )
            if part in taken:
                raise ValueError(
                    f"axes {taken[part]!r} and {axis!r} of {name} are both on mesh axis {part!r}; "
                    "change a rule so that each has its own."
                )
            taken[part] = str(axis)
        ways = math.prod(mesh.shape[part] for part in parts)
        if shape is not None and shape[position] % ways:
            raise ValueError(
                f"axis {axis!r} of {name} has size {shape[position]}, which {ways} shards "
                f"(mesh axis {'+'.join(parts)}) do not divide."
            )
        spec.append(rule)
    return NamedSharding(mesh, PartitionSpec(*spec))


def shardings(config: DecoderConfig, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> Decoder:
    """Returns a decoder whose leaves are the NamedSharding of each weight.

    Raises ValueError as `sharding_of` does, and when a shard would split a head.
    """
    for axis, size in (("heads", config.heads), ("kv", config.kv_heads)):
        # The flat width H*Q may divide where H does not: a head would then lie on two chips.
        rule = rules.get(axis)
        parts = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
        ways = math.prod(mesh.shape.get(part, 1) for part in parts)
        if size % ways:
            noun = "heads" if axis == "heads" else "kv_heads"
            raise ValueError(
                f"config {noun} {size} cannot be split over {ways} shards (mesh axis {'+'.join(parts)})."
            )

    def place(path, axes, spec) -> NamedSharding:
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        return sharding_of(axes, mesh, rules, spec.shape, name)

    return jax.tree_util.tree_map_with_path(
        place, logical_axes(config), abstract(config, np.float32), is_leaf=lambda x: isinstance(x, tuple)
    )
