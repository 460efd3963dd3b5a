"""The safetensors format: a header checked before it is trusted, tensors mapped rather than read.

The safetensors package cannot give bfloat16 to numpy; the format is a length, a JSON header and raw bytes.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxlayers.weights.strict import parse_json, quoted

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 16 << 20  # bytes: ten times that of the largest public checkpoints


class Slot(NamedTuple):
    """Where one tensor lies in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    stop: int


def read_header(path: Path) -> dict[str, Slot]:
    """Returns every tensor of a safetensors file by name.

    Raises ValueError, one sentence naming the file, unless the header is well formed and its tensors fill
    the file exactly, without a gap or an overlap.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise ValueError(
                f"{path} is cut short or no safetensors file: its header does not fit in {size} bytes."
            )
        if length > LARGEST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes, more than any decoder needs.")
        header = parse_json(file.read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    slots = {name: _slot(path, name, item, 8 + length) for name, item in header.items()}
    end = 8 + length
    for name, slot in sorted(slots.items(), key=lambda item: item[1][2:]):
        if slot.start != end:
            raise ValueError(
                f"{path} places tensor {quoted(name)} at byte {slot.start} where byte {end} is due; "
                "its header is damaged."
            )
        end = slot.stop
    if end != size:
        raise ValueError(f"{path} has {size} bytes where its header describes {quoted(end)}.")
    return slots


def _slot(path: Path, name: str, item, data: int) -> Slot:
    def whole(values) -> bool:
        return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)

    if not isinstance(item, dict) or not whole(item.get("shape")) or not whole(item.get("data_offsets")):
        raise ValueError(f"{path} describes tensor {quoted(name)} without a valid shape and data_offsets.")
    dtype, shape, offsets = item.get("dtype"), item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{path} holds tensor {quoted(name)} as {quoted(dtype)}, which is none of {', '.join(DTYPES)}."
        )
    # The rank comes first: a product of many large numbers could take for ever.
    if len(shape) > 8 or len(offsets) != 2 or any(n >= 1 << 62 for n in shape + offsets):
        raise ValueError(f"{path} describes tensor {quoted(name)} with an absurd shape or data_offsets.")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
        raise ValueError(
            f"{path} gives tensor {quoted(name)} of shape {quoted(tuple(shape))} the bytes {offsets[0]} to "
            f"{offsets[1]} where it needs {quoted(size)}."
        )
    return Slot(DTYPES[dtype], tuple(shape), data + offsets[0], data + offsets[1])


class TensorFile:
    """One safetensors file as a mapping; an `assemble.Source`."""

    def __init__(self, path: Path):
        self.where = str(path)
        self.slots = read_header(path)
        self.shapes = {name: slot.shape for name, slot in self.slots.items()}
        self._bytes = np.memmap(path, np.uint8, "r")

    def read(self, name: str) -> np.ndarray:
        """Returns a read-only view of the mapped file."""
        slot = self.slots[name]
        return self._bytes[slot.start : slot.stop].view(np.ndarray).view(slot.dtype).reshape(slot.shape)


def write_tensors(
    path: Path,
    tensors: Iterable[np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
) -> None:
    """Writes tensors, in the order of `shapes` and one at a time, as a safetensors file of one dtype.

    Raises ValueError when a tensor is not the one that `shapes` announced.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"Tensor {name} is {tensor.dtype} {tensor.shape}, not {dtype} {shape}.")
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
