"""Named tensors of a checkpoint into the stacked tree, leaf by leaf."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import Decoder, abstract
from jaxlayers.mesh import shardings
from jaxlayers.weights.strict import quoted

Path = tuple[str, ...]
ALIGNMENT = 64  # bytes; jax takes over a numpy array without a copy on CPU when it starts at a multiple


class Source(Protocol):
    """Where tensors come from. `read` may return a view of a mapped file: nothing here writes to it."""

    where: str  # file or folder, for messages

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in a float dtype and with the shape that `shapes` promises."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """Which tensor of a checkpoint fills a leaf; `{}` in the name stands for the layer index.

    `convert` works on the tensor as stored and keeps its shape; the transposition comes after it.
    """

    name: str
    transposed: bool = False
    convert: Callable[[np.ndarray, DecoderConfig], np.ndarray] | None = None


Table = Mapping[Path, Entry]  # keyed by the path below `Decoder.embedding` or `Decoder.layers`


def assemble(
    config: DecoderConfig,
    source: Source,
    table: Table,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    ignore: Iterable[str] = (),
) -> Decoder:
    """Returns the decoder of `config` with the tensors of `source`, cast to `dtype`.

    The stacked leaf is the unit of loading: beside the weights themselves at most one is held. With a mesh
    each device gets its shard only, and of a mapped file only the pages of those shards are read. Names that
    match a pattern of `ignore` (fnmatch) may be there or not. A tied decoder ignores a head in the
    checkpoint, provided it equals the table.

    Raises ValueError naming the tensor when one is missing, unexpected, misshapen, not finite, or not finite
    any more in `dtype`. Names and shapes are checked before anything is read.
    """
    dtype = np.dtype(dtype)
    tree = abstract(config, dtype)
    spare = [table[("head",)].name] if config.tied and ("head",) in table else []
    _check_names(tree, source, table, [*ignore, *spare])
    for head in spare:
        if head in source.shapes:
            _check_tied(source, table[("table",)].name, head)
    placed = shardings(config, mesh) if mesh is not None else None

    def leaf(path, spec: jax.ShapeDtypeStruct, sharding: NamedSharding | None = None) -> jax.Array:
        stacked, entry = path[0].name == "layers", table[_keys(path)]

        def fill(index: tuple[slice, ...]) -> np.ndarray:
            return _read(source, entry, config, spec, index, stacked)

        if sharding is None:
            return jax.device_put(fill((slice(None),) * len(spec.shape)))
        return _place(spec, sharding, fill)

    with np.errstate(over="ignore", invalid="ignore"):
        trees = (tree,) if placed is None else (tree, placed)
        return jax.tree_util.tree_map_with_path(leaf, *trees)


def expected_shapes(tree: Decoder, table: Table) -> dict[str, tuple[int, ...]]:
    """Returns the name and stored shape of every tensor that fills a decoder (arrays or abstract)."""
    shapes = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(tree):
        entry, stacked = table[_keys(path)], path[0].name == "layers"
        shape = spec.shape[1:] if stacked else spec.shape
        shape = shape[::-1] if entry.transposed else shape
        names = [entry.name.format(i) for i in range(spec.shape[0])] if stacked else [entry.name]
        shapes.update(dict.fromkeys(names, shape))
    return shapes


def checked_cast(array: np.ndarray, out: np.ndarray, name: str, where: str) -> None:
    """Writes array into out; raises ValueError naming the tensor where a value is or becomes not finite."""
    out[...] = array
    if np.isfinite(out).all():
        return
    if np.isfinite(array).all():
        raise ValueError(
            f"Tensor {name} in {where} holds values beyond the range of {out.dtype}; load it as float32."
        )
    raise ValueError(f"Tensor {name} in {where} holds NaN or infinity; the checkpoint is damaged.")


def _keys(path) -> Path:
    return tuple(key.key for key in path[1:])


def _check_names(tree: Decoder, source: Source, table: Table, ignore: list[str]) -> None:
    expected = expected_shapes(tree, table)
    for name, shape in expected.items():
        if name not in source.shapes:
            raise ValueError(
                f"{source.where} has no tensor {name}, which its config needs with shape {shape}."
            )
        found = tuple(source.shapes[name])
        if found != shape:
            raise ValueError(
                f"Tensor {name} in {source.where} has shape {quoted(found)} where its config needs {shape}."
            )
    for name, shape in source.shapes.items():
        if name not in expected and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
            raise ValueError(
                f"{source.where} has a tensor {quoted(name)} of shape {quoted(tuple(shape))} that no part "
                "of the decoder takes; its config describes another model."
            )


def _check_tied(source: Source, table: str, head: str) -> None:
    if source.shapes[head] != source.shapes[table] or not np.array_equal(
        source.read(head), source.read(table)
    ):
        raise ValueError(
            f"{source.where} is marked as tied but its {head} differs from {table}; "
            "set tie_word_embeddings to false in its config."
        )


def _read(
    source: Source,
    entry: Entry,
    config: DecoderConfig,
    spec: jax.ShapeDtypeStruct,
    index: tuple[slice, ...],
    stacked: bool,
) -> np.ndarray:
    """Returns spec[index] of a leaf, filled one layer at a time."""
    out = _aligned(
        tuple(len(range(*part.indices(n))) for part, n in zip(index, spec.shape, strict=True)), spec.dtype
    )

    def part(name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        array = source.read(name)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"Tensor {name} in {source.where} is {array.dtype}; weights must be floats.")
        if entry.convert is not None:
            array = entry.convert(array, config)
        if entry.transposed:
            array = array.T
        checked_cast(array[index], out, name, source.where)

    if stacked:
        for row, layer in enumerate(range(*index[0].indices(spec.shape[0]))):
            part(entry.name.format(layer), index[1:], out[row])
    else:
        part(entry.name, index, out)
    return out


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    block = np.empty(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype).reshape(shape)


def _place(
    spec: jax.ShapeDtypeStruct, sharding: NamedSharding, fill: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Returns the sharded array; a shard that several devices hold is read once."""
    devices: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        devices.setdefault(tuple((part.start, part.stop) for part in index or ()), []).append(device)
    arrays = []
    for bounds, holders in devices.items():
        block = fill(tuple(slice(*part) for part in bounds))
        arrays += [jax.device_put(block, device) for device in holders]
        del block
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)
