"""The program: a table that says which layer of a decoder runs when.

Rows run in sequence, the lanes of a row side by side. `program_text` holds the grammar of the text form.
Axis letters: `R` rows, `W` visits of a row, `L` layers. Everything here runs on the host with numpy; under
`jax.jit` a `Program` is an ordinary pytree of small arrays.
"""

import functools
import itertools
import os
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import Float32, Int32

from jaxlayers.files import replacing
from jaxlayers.program_text import (
    ATTENTION,
    CONTINUE,
    MAX_TEXT,
    MEAN,
    MLP,
    SUM,
    WHOLE,
    Item,
    Row,
    ids_text,
    is_single,
    items_of,
    meaning,
    parse_items,
    pieces,
    shorten,
)

__all__ = [
    "ATTENTION",
    "CONTINUE",
    "MEAN",
    "MLP",
    "SUM",
    "WHOLE",
    "Program",
    "as_program",
    "from_mergekit",
    "identity",
    "loop",
    "looped_parallel",
    "middle_repeat",
    "newton",
    "parallel",
    "reverse",
    "shuffle",
    "skip",
    "to_mergekit",
]

_Table = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """Which layer runs when, as data: programs of one shape (R, W, slots) share one compilation.

    Programs are equal when their depth and canonical text are; padding does not count. Nothing is checked
    on construction, because jax rebuilds the pytree with tracers: make one by `parse` or by a builder.
    """

    layer: Int32[_Table, "R W"]  # layer id, -1 pads
    part: Int32[_Table, "R W"]  # WHOLE, ATTENTION or MLP, -1 pads
    scale: Float32[_Table, "R W"]  # factor of the visit's branches, 1 where padded
    group: Int32[_Table, "R W"]  # lane of the visit: 0, 1, 2.. in order, one for a fused group; -1 pads
    slot: Int32[_Table, "R W"]  # place of its K/V, counted over visits with attention row by row; else -1
    kind: Int32[_Table, " R"]  # SUM, MEAN or CONTINUE (the next Newton iteration of the row before)
    depth: int = field(metadata={"static": True})  # L, the layers of the model
    slots: int = field(metadata={"static": True})  # K/V slots to allocate

    @classmethod
    def parse(cls, text: str, depth: int) -> "Program":
        """The program that `text` describes for a model of `depth` layers."""
        _check_depth(depth)
        return _table(parse_items(text, int(depth)), int(depth))

    @property
    def rows(self) -> int:
        """R, padding included."""
        return self.layer.shape[0]

    @property
    def lanes(self) -> int:
        """W, padding included; 1 only where no row is a Newton continuation."""
        return self.layer.shape[1]

    @property
    def visits(self) -> int:
        """How many times a layer (or one branch of it) runs: the cost of the program."""
        return int((np.asarray(self.layer) >= 0).sum())

    @property
    def layers(self) -> tuple[int, ...]:
        """The distinct layer ids, sorted."""
        return tuple(i for i in np.unique(np.asarray(self.layer)).tolist() if i >= 0)

    @classmethod
    def of(cls, items: Sequence[Item], depth: int) -> "Program":
        """The program of `items`, such as those of other programs for a model of the same depth."""
        _check_depth(depth)
        return _table(items, depth)

    @functools.cached_property
    def items(self) -> tuple[Item, ...]:
        """The rows as whole steps, a Newton row with its continuations as one; equal steps are equal.

        ValueError for a table made by hand that no text expresses.
        """
        return tuple(items_of(self._key, self.depth))

    @functools.cached_property
    def _key(self) -> tuple[Row, ...]:
        """The table without padding."""
        columns = [np.asarray(x).tolist() for x in (self.layer, self.part, self.scale, self.group, self.slot)]
        key = []
        for kind, *row in zip(np.asarray(self.kind).tolist(), *columns, strict=True):
            if visits := tuple(visit for visit in zip(*row, strict=True) if visit[0] >= 0):
                one_lane = len({group for *_, group, _ in visits}) == 1
                key.append((SUM if kind == MEAN and one_lane else kind, visits))
        return tuple(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return self.depth == other.depth and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.depth, self._key))

    def __str__(self) -> str:
        """The canonical text; ValueError for a table made by hand that no text expresses."""
        return ",".join(text for text, _ in pieces(self.items))

    def __repr__(self) -> str:
        try:
            return f"Program({str(self)!r}, depth={self.depth})"
        except Exception:  # leaves are tracers or placeholders, or the table has no text: still printable
            shape = getattr(self.layer, "shape", None)
            return f"Program(<table of shape {shape}>, depth={self.depth}, slots={self.slots})"

    def pad(self, rows: int | None = None, lanes: int | None = None, slots: int | None = None) -> "Program":
        """The same program in a table of the given shape; None keeps a size."""
        used = np.asarray(self.layer) >= 0
        newton = bool((np.asarray(self.kind) == CONTINUE).any())
        needed = {
            "rows": int(np.flatnonzero(used.any(axis=1)).max(initial=-1)) + 1,
            "lanes": max(int(np.flatnonzero(used.any(axis=0)).max(initial=-1)) + 1, 2 if newton else 1),
            "slots": int(np.asarray(self.slot).max(initial=-1)) + 1,
        }
        size = {
            "rows": self.rows if rows is None else rows,
            "lanes": self.lanes if lanes is None else lanes,
            "slots": self.slots if slots is None else slots,
        }
        for name, least in needed.items():
            if size[name] < least:
                raise ValueError(f"cannot pad to {name}={size[name]}: this program needs at least {least}")
        shape = size["rows"], size["lanes"]

        def grow(array: Any, fill: float) -> np.ndarray:
            out = np.full(shape[: array.ndim], fill, array.dtype)
            part = tuple(slice(min(a, b)) for a, b in zip(out.shape, array.shape, strict=True))
            out[part] = np.asarray(array)[part]
            return _frozen(out)

        tables = (self.layer, self.part, self.scale, self.group, self.slot, self.kind)
        grown = [grow(table, fill) for table, fill in zip(tables, (-1, -1, 1, -1, -1, SUM), strict=True)]
        return Program(*grown, depth=self.depth, slots=int(size["slots"]))

    def describe(self) -> str:
        """What every row does and what the program costs, as lines for a terminal."""
        parts = pieces(self.items)
        lines, row = [f"program for a model of {self.depth} layers"], 0
        texts = [shorten(text, 32) for text, _ in parts]
        width = max(map(len, texts))
        for text, (_, items) in zip(texts, parts, strict=True):
            stop = row + sum(item.iterations for item in items)
            place = f"row {row}" if stop == row + 1 else f"rows {row}-{stop - 1}"
            lines.append(f"  {place:<14} {text:<{width}}  {meaning(items)}")
            row = stop
        times = Counter(visit[0] for _, visits in self._key for visit in visits)
        gaps = itertools.pairwise([-1, *sorted(times), self.depth])
        idle = ",".join(f"{a + 1}-{b - 1}" if b - a > 2 else f"{a + 1}" for a, b in gaps if b - a > 1)
        again = sorted(layer for layer, n in times.items() if n > 1)
        lines += [
            f"{self.rows} rows, {self.lanes} lanes, {self.slots} slots, {self.visits} visits: "
            f"{self.visits / self.depth:.2f} times the cost of the plain model",
            f"layers never visited: {shorten(idle, 80) or 'none'}",
            f"layers visited more than once: {shorten(ids_text(again), 80) or 'none'}",
        ]
        return "\n".join(lines)

    @classmethod
    def read(cls, path: str | os.PathLike[str], depth: int) -> "Program":
        """The program in a text file, where lines may break between tokens and `#` starts a comment."""
        name = f"the program file {os.fspath(path)!r}"
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_TEXT + 1)  # a limit, because a device file may never end
        except OSError as error:
            raise type(error)(f"cannot read {name}: {error.strerror}") from error
        if len(data) > MAX_TEXT:
            raise ValueError(f"{name} has more than {MAX_TEXT} bytes; is it a program?")
        try:
            # A comment leaves an empty line, so that the lines in messages are those of the file.
            return cls.parse(re.sub(r"#[^\r\n]*", "", data.decode("utf-8-sig")), depth)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 text; save it as UTF-8") from error
        except ValueError as error:
            raise ValueError(f"in {name}: {error}") from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the canonical text; a reader sees the old file or the new one, never half of it."""
        text = f"{self}\n"
        try:
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            name = str(Path(path))
            raise type(error)(f"cannot write the program file {name!r}: {error.strerror}") from error


def _check_depth(depth: int) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int | np.integer) or not 1 <= depth < 2**31:
        raise ValueError(f"the depth of a model is a whole number of at least 1, not {reprlib.repr(depth)}")


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)  # programs are dictionary keys: their tables do not change
    return array


def _table(items: Sequence[Item], depth: int) -> Program:
    """The table of checked items; slots are counted over visits with attention in row-major order."""
    heads = [(item, i > 0) for item in items for i in range(item.iterations)]
    newton = any(later for _, later in heads)
    # Executors take a table one visit wide to have no Newton rows, so these get a second column at least.
    width = max(2 if newton else 1, max(sum(map(len, item.lanes)) for item in items))
    layer, part, group = (np.full((len(heads), width), -1, np.int32) for _ in range(3))
    scale = np.ones((len(heads), width), np.float32)
    for row, (item, _) in enumerate(heads):
        visits = [(*visit, lane) for lane, group_visits in enumerate(item.lanes) for visit in group_visits]
        n = len(visits)
        layer[row, :n], part[row, :n], group[row, :n] = zip(*visits, strict=True)
        scale[row, :n] = item.scale
    attends = (part == WHOLE) | (part == ATTENTION)
    slot = np.where(attends, np.cumsum(attends).reshape(attends.shape) - 1, -1).astype(np.int32)
    kind = np.array([CONTINUE if later else item.kind for item, later in heads], np.int32)
    tables = map(_frozen, (layer, part, scale, group, slot, kind))
    return Program(*tables, depth=depth, slots=int(attends.sum()))


# --- builders: the programs that papers name ----------------------------------------------------------------


def _around(depth: int, start: int, stop: int, block: str) -> Program:
    """The plain model with its layers start..stop replaced by the text `block`."""
    _check_depth(depth)
    if not 0 <= start <= stop < depth:
        raise ValueError(
            f"block {start}..{stop} is not inside layers 0..{depth - 1}; use 0 <= start <= stop < depth"
        )
    before = [f"0-{start - 1}"] if start > 0 else []
    after = [f"{stop + 1}-{depth - 1}"] if stop < depth - 1 else []
    return Program.parse(",".join([*before, block, *after]), depth)


def common_shape(programs: Sequence[Program]) -> tuple[int, int, int]:
    """Returns the smallest (rows, lanes, slots) that all the programs can be padded to."""
    return tuple(max(getattr(p, size) for p in programs) for size in ("rows", "lanes", "slots"))


def as_program(program: Program | str | None, depth: int) -> Program:
    """The program itself, the one that a text describes, or the plain model for None.

    ValueError for anything else, and for a program of another depth.
    """
    if program is None:
        return identity(depth)
    if isinstance(program, str):
        return Program.parse(program, depth)
    if not isinstance(program, Program):
        raise ValueError(
            f"a program is a Program, its text, or None for the plain model, not {type(program).__name__}"
        )
    if program.depth != depth:
        raise ValueError(
            f"the program is for {program.depth} layers and the decoder has {depth}; "
            f"parse it with depth={depth}"
        )
    return program


def identity(depth: int) -> Program:
    """The plain model: every layer once, in order."""
    _check_depth(depth)
    return Program.parse(f"0-{depth - 1}", depth)


def skip(depth: int, layers: Iterable[int]) -> Program:
    """The plain model without `layers`, as in "Transformer layers as painters" (arXiv 2407.09298)."""
    _check_depth(depth)
    left_out = set(layers)
    if unknown := sorted(left_out - set(range(depth))):
        raise ValueError(f"cannot skip layer {unknown[0]}: ids of this model run from 0 to {depth - 1}")
    if len(left_out) == depth:
        raise ValueError(f"cannot skip all {depth} layers: a program visits at least one layer")
    return Program.parse(",".join(str(i) for i in range(depth) if i not in left_out), depth)


def loop(depth: int, start: int, stop: int, times: int) -> Program:
    """The block start..stop (inclusive) run `times` times in place."""
    return _around(depth, start, stop, f"({start}-{stop})x{times}")


def reverse(depth: int, start: int, stop: int) -> Program:
    """The block start..stop downward ("Transformer layers as painters", arXiv 2407.09298)."""
    return _around(depth, start, stop, f"{stop}-{start}")


def shuffle(depth: int, start: int, stop: int, seed: int) -> Program:
    """The block start..stop in random order ("Transformer layers as painters", arXiv 2407.09298)."""
    order = np.random.default_rng(seed).permutation(np.arange(start, stop + 1))
    return _around(depth, start, stop, ",".join(map(str, order)))


def middle_repeat(depth: int, start: int, stop: int) -> Program:
    """The centre layer of start..stop run as often as the block is long ("painters", arXiv 2407.09298)."""
    return _around(depth, start, stop, f"{(start + stop) // 2}x{stop - start + 1}")


def parallel(depth: int, start: int, stop: int, form: str = "mean") -> Program:
    """The block start..stop as one row; `form` is 'mean', 'sum' or 'fused'.

    The mean comes from "Transformer layers as painters" (arXiv 2407.09298), the fused row from
    "Leveraging the true depth of LLMs" (LP, arXiv 2502.02790).
    """
    forms = {"mean": "/mean", "sum": "", "fused": "/fused"}
    if form not in forms:
        raise ValueError(f"form {form!r} is unknown; use 'mean', 'sum' or 'fused'")
    return _around(depth, start, stop, f"[{start}-{stop}]{forms[form]}")


def newton(depth: int, start: int, stop: int, iterations: int) -> Program:
    """The block start..stop solved together by Newton iterations with J = I (SNLP, arXiv 2605.17842)."""
    return _around(depth, start, stop, f"[{start}-{stop}]@{iterations}")


def looped_parallel(depth: int, start: int, stop: int, times: int) -> Program:
    """The mean row of start..stop repeated ("Transformer layers as painters", arXiv 2407.09298)."""
    return _around(depth, start, stop, f"[{start}-{stop}]/mean x{times}")


_MERGEKIT_KEYS = {
    "slices", "merge_method", "dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template",
}  # fmt: skip


def from_mergekit(yaml_text: str, depth: int | None = None) -> Program:
    """The program of a mergekit passthrough merge of one model.

    `depth` None takes the largest end of a layer_range.
    """
    import yaml

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"this mergekit config is not a program: {reason}")

    def check_keys(where: str, found: dict[Any, Any], known: set[str]) -> None:
        if "parameters" in found:
            reason = "scales and filters there act on single tensors, which no program text expresses"
            refuse(f"{where} has parameters, and {reason}")
        if unknown := [key for key in found if key not in known]:
            refuse(f"{where} has the key {reprlib.repr(unknown[0])}, which has no counterpart; remove it")

    try:
        config = yaml.safe_load(yaml_text)
    except Exception as error:  # on hostile text PyYAML raises far more than its own YAMLError
        mark = getattr(error, "problem_mark", None)
        refuse(f"it is not valid YAML{f' (line {mark.line + 1})' if mark else ''}")
    if not isinstance(config, dict) or not isinstance(slices := config.get("slices"), list) or not slices:
        refuse("it needs a list 'slices' of layer ranges")
    if (method := config.get("merge_method")) != "passthrough":
        refuse(f"merge_method is {reprlib.repr(method)}, and only passthrough keeps layers as they are")
    check_keys("the top level", config, _MERGEKIT_KEYS)
    spans, models = [], set()
    for number, part in enumerate(slices, 1):
        where = f"slice {number}"
        sources = part.get("sources") if isinstance(part, dict) else None
        if not isinstance(sources, list) or len(sources) != 1 or not isinstance(source := sources[0], dict):
            refuse(f"{where} needs exactly one source, with a model and a layer_range")
        check_keys(where, part, {"sources"})
        check_keys(where, source, {"model", "layer_range"})
        if not isinstance(model := source.get("model"), str):
            refuse(f"{where} needs the name of its model")
        models.add(model)
        span = source.get("layer_range")
        if not isinstance(span, list) or len(span) != 2 or any(type(end) is not int for end in span):
            refuse(f"the layer_range of {where} needs two whole numbers, as in [0, 16]")
        if not 0 <= span[0] < span[1] <= (depth or span[1]):
            bound = f" <= {depth}" if depth else ""
            refuse(f"the layer_range {reprlib.repr(span)} of {where} breaks 0 <= start < end{bound}")
        spans.append(span)
    if len(models) > 1:
        refuse(f"it mixes {len(models)} models, and a program runs the layers of one")
    text = ",".join(f"{start}-{end - 1}" for start, end in spans)
    return Program.parse(text, max(end for _, end in spans) if depth is None else depth)


def to_mergekit(program: Program, model: str) -> str:
    """The YAML of the mergekit passthrough merge that writes this program as a model of its own."""
    import yaml

    spans: list[list[int]] = []
    for text, items in pieces(items_of(program._key, program.depth)):
        if any(not is_single(item) or item.lanes[0][0][1] != WHOLE or item.scale != 1 for item in items):
            rule = "a passthrough merge holds whole unscaled layers in sequence"
            raise ValueError(f"mergekit cannot stack {shorten(text, 40)!r}: {rule}")
        for item in items:
            layer = item.lanes[0][0][0]
            if spans and spans[-1][1] == layer:
                spans[-1][1] += 1
            else:
                spans.append([layer, layer + 1])
    slices = [{"sources": [{"model": model, "layer_range": span}]} for span in spans]
    config = {"slices": slices, "merge_method": "passthrough"}
    return yaml.safe_dump(config, sort_keys=False, default_flow_style=None)
