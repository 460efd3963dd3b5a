"""The GGUF format: a header checked before it is trusted, tensors mapped and dequantised one at a time.

The reader of the gguf package trusts lengths (a declared array of 2^40 elements hangs it) and takes seconds
for the string arrays of a vocabulary; its constants and its dequantisation are what is used of it here.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Quantization

from jaxlayers.weights.strict import quoted

FLOATS = {
    Quantization.F32: np.dtype("<f4"),
    Quantization.F16: np.dtype("<f2"),
    Quantization.BF16: np.dtype(ml_dtypes.bfloat16),
    Quantization.F64: np.dtype("<f8"),
}
NUMBERS = {  # value types of the metadata
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9
DEEPEST_ARRAY = 4
LONGEST_NAME = 65_535  # bytes of a key or of a tensor's name, as the format has it
MOST_DIMENSIONS = 4


class Slot(NamedTuple):
    """Where one tensor lies in a file."""

    type: Quantization
    shape: tuple[int, ...]  # slowest axis first, as in numpy; the file has it the other way round
    start: int  # byte in the file
    stop: int


class GgufFile:
    """A GGUF file: `metadata` by key and, as an `assemble.Source`, its tensors by name.

    A metadata value is a bool, int, float, str, list of str or, for numbers, a numpy array.
    """

    def __init__(self, path: str | Path):
        """Raises OSError, and ValueError in one sentence unless the whole header is well formed."""
        self.where = str(path)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ValueError(f"{path} is too short for a GGUF file.")
        self._bytes = np.memmap(path, np.uint8, "r")
        head = _Header(self._bytes)
        try:
            self.metadata, self.slots = head.read()
        except ValueError as error:
            raise ValueError(f"{path} is damaged or no GGUF file: {error} (at byte {head.at}).") from None
        self.shapes: Mapping[str, tuple[int, ...]] = {name: slot.shape for name, slot in self.slots.items()}

    @property
    def dtype(self) -> np.dtype:
        """What the matrices are stored in, or float32 when any is quantised or they differ."""
        found = {slot.type for slot in self.slots.values() if len(slot.shape) > 1}
        single = FLOATS.get(*found) if len(found) == 1 else None
        return np.dtype(np.float32) if single is None else single

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor: a read-only view of the mapped file, or float32 when it is stored quantised.

        Raises ValueError naming the tensor and its type when that cannot be dequantised.
        """
        slot = self.slots[name]
        data = self._bytes[slot.start : slot.stop].view(np.ndarray)
        if slot.type in FLOATS:
            return data.view(FLOATS[slot.type]).reshape(slot.shape)
        rows = data.reshape(*slot.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # damaged scales come out as NaN, which the caller refuses
                return gguf.dequantize(rows, slot.type)
        except NotImplementedError:
            raise ValueError(
                f"Tensor {name} in {self.where} has type {slot.type.name}, which cannot be dequantised; "
                "convert the file to F16 or Q8_0."
            ) from None


class _Header:
    """A cursor over the header. Every length is compared with the bytes that are left before it is used."""

    def __init__(self, data: np.ndarray):
        self._data, self._end, self.at = data.data, len(data), 0

    def read(self) -> tuple[dict[str, Any], dict[str, Slot]]:
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        version = self._number(4)
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (2, 3):
                raise ValueError("it is big-endian, and only little-endian files are supported")
            raise ValueError(f"it has version {version}, and only 2 and 3 are supported")
        tensors, keys = self._count(24, "tensors"), self._count(13, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name("key")
            if key in metadata:
                raise ValueError(f"the key {quoted(key)} stands twice")
            metadata[key] = self._value(self._number(4), f"key {quoted(key)}")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {quoted(alignment)}, which is no power of two")
        slots: dict[str, Slot] = {}
        for _ in range(tensors):
            name = self._name("tensor name")
            if name in slots:
                raise ValueError(f"the tensor {quoted(name)} stands twice")
            slots[name] = self._slot(f"tensor {quoted(name)}")
        start = -(-self.at // alignment) * alignment
        for name, slot in slots.items():
            if slot.start % alignment:
                raise ValueError(f"tensor {quoted(name)} starts at no multiple of {alignment}")
            slots[name] = slot._replace(start=start + slot.start, stop=start + slot.stop)
            if start + slot.stop > self._end:
                raise ValueError(
                    f"tensor {quoted(name)} ends at byte {start + slot.stop} of a file of {self._end} bytes, "
                    "which is cut short"
                )
        return metadata, slots

    def _take(self, size: int) -> memoryview:
        if size > self._end - self.at:
            raise ValueError(f"{size} bytes are due where the file has {self._end - self.at} left")
        self.at += size
        return self._data[self.at - size : self.at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _count(self, size: int, what: str) -> int:
        """Returns a number of things that take at least `size` bytes each."""
        count = self._number(8)
        if count > (self._end - self.at) // size:
            raise ValueError(f"it announces {count} {what}, more than the file can hold")
        return count

    def _name(self, what: str) -> str:
        name = self._string(what)
        if not name or len(name) > LONGEST_NAME:
            raise ValueError(f"a {what} is empty or has {len(name)} characters")
        return name

    def _string(self, what: str) -> str:
        data = self._take(self._number(8))
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"the string of {what} is not UTF-8") from None

    def _value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in NUMBERS:
            value = self._numbers(kind, 1, what)[0]
            # The shortest decimal that a float32 stands for: 1e-05, as the model's authors wrote it.
            return float(str(value)) if value.dtype == np.float32 else value.item()
        if kind == STRING:
            return self._string(what)
        if kind != ARRAY:
            raise ValueError(f"{what} has the unknown value type {kind}")
        if depth == DEEPEST_ARRAY:
            raise ValueError(f"{what} nests arrays deeper than {DEEPEST_ARRAY}")
        kind = self._number(4)
        if kind in NUMBERS:
            return self._numbers(kind, self._count(NUMBERS[kind].itemsize, "elements"), what)
        if kind == STRING:
            return self._strings(self._count(8, "strings"), what)
        return [self._value(kind, what, depth + 1) for _ in range(self._count(12, "arrays"))]

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = NUMBERS[kind]
        values = np.frombuffer(self._take(count * dtype.itemsize), np.uint8)
        if dtype == np.bool_ and (values > 1).any():
            raise ValueError(f"{what} holds a boolean that is neither 0 nor 1")
        return values.view(dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        # A vocabulary has a hundred thousand of them: this is `_string` without its calls.
        data, end, at, found = self._data, self._end, self.at, []
        try:
            for _ in range(count):
                stop = at + 8
                size = int.from_bytes(data[at:stop], "little")
                at = stop + size
                if at > end:
                    raise ValueError(f"a string of {what} has {size} bytes, more than the file has left")
                found.append(str(data[stop:at], "utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"string {len(found)} of {what} is not UTF-8") from None
        self.at = at
        return found

    def _slot(self, what: str) -> Slot:
        rank = self._number(4)
        if not 1 <= rank <= MOST_DIMENSIONS:
            raise ValueError(f"{what} has {rank} dimensions")
        shape = tuple(self._number(8) for _ in range(rank))[::-1]
        kind, offset = self._number(4), self._number(8)
        try:
            type = Quantization(kind)
            block, size = gguf.GGML_QUANT_SIZES[type]
        except (ValueError, KeyError):
            raise ValueError(f"{what} has the unknown type {kind}") from None
        if min(shape) < 1 or shape[-1] % block:
            raise ValueError(f"{what} of type {type.name} has shape {shape}, not in whole blocks of {block}")
        return Slot(type, shape, offset, offset + math.prod(shape) // block * size)
