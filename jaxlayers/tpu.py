"""Compiles for a TPU that is not attached, and reads what the compiler made: memory, and what reaches HBM.

Needs libtpu (`pip install "jaxlayers[tpu]"`), which compiles on a host without a TPU.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
}
# Results of these are names for other buffers, or are counted where they are made.
NAMES_ONLY = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "copy-done",
    "async-done",
}
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (\(?)(\w+)\[([\d,]*)\](\{[^}]*\})?.*? ([a-z][\w-]*)\(")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an instruction outside a fusion puts in HBM."""

    operation: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array without padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES.get(self.dtype, 4)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the TPU compiler made of a function: bytes a chip, and the optimised HLO text."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    code_bytes: int
    hlo: str

    def materialised(self, least_bytes: int = 1 << 16) -> list[Array]:
        """Returns the arrays of at least so many bytes which reach HBM, largest first.

        A gathered or copied weight, a rewritten cache and a spilled score matrix show here. The update in
        place of a loop's own buffer shows too, with the size of the buffer: compare with a version known to
        be right.
        """
        found, fused = [], False
        for line in self.hlo.splitlines():
            if line.rstrip().endswith("{") and "(" in line:
                fused = "fused_computation" in line.split("(")[0]
                continue
            match = INSTRUCTION.match(line)
            if fused or not match or match[5] in NAMES_ONLY or "S(1)" in (match[4] or ""):  # S(1) is VMEM
                continue
            shape = tuple(int(d) for d in match[3].split(",") if d)
            array = Array(match[5], match[2], shape)
            if array.nbytes >= least_bytes:
                found.append(array)
        return sorted(found, key=lambda array: -array.nbytes)


def devices(topology: str = "v5e:2x2") -> list[Any]:
    """Returns the device descriptions of a topology such as `v5e:2x2` or `v6e:2x2`.

    Raises RuntimeError in one sentence where libtpu is missing or does not know the topology.
    """
    # The first keeps libtpu from asking a metadata server, the second from refusing when another process
    # has it open.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:  # jax raises whatever the plugin raised
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"topology {topology!r} cannot be compiled for here ({reason}); "
            'install libtpu with pip install "jaxlayers[tpu]" and give a topology such as v5e:2x2.'
        ) from error


def compile_for(
    function: Callable, *args: Any, topology: str = "v5e:2x2", donate: tuple[int, ...] = ()
) -> Compiled:
    """Compiles function(*args) for one chip of a topology.

    Args:
      function: a function that jax.jit takes; static arguments are bound beforehand.
      args: arrays or jax.ShapeDtypeStruct trees.
      topology: a slice of which the first chip is used.
      donate: positions of arguments whose buffers the result may take.
    """
    mesh = Mesh(np.array(devices(topology)[:1]), ("chip",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype), sharding=here), args
    )
    compiled = jax.jit(function, donate_argnums=donate).trace(*shapes).lower().compile()
    memory = compiled.memory_analysis()
    return Compiled(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        compiled.as_text(),
    )
