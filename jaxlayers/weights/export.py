"""A decoder under a program as a Hugging Face folder whose layers are the visits."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxlayers.decoder.layer import DecoderLayer
from jaxlayers.decoder.stack import Decoder, abstract
from jaxlayers.program import CONTINUE, WHOLE, Program
from jaxlayers.weights.assemble import Path, expected_shapes
from jaxlayers.weights.hf import TABLE, config_json
from jaxlayers.weights.tensor_file import NAMES, write_tensors

if TYPE_CHECKING:
    from jaxlayers.weights.tokenizer import Tokenizer

SHARD_BYTES = 5 << 30  # what transformers takes for one file


def export(
    decoder: Decoder,
    program: Program | None,
    folder: str | pathlib.Path,
    tokenizer: "Tokenizer | None" = None,
    shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:
    """Writes a folder that transformers loads as a plain model and returns its path.

    Its layer i is the i-th visit of the program (None: every layer once), so a layer visited twice is stored
    twice; dtype, tied head and windows are the decoder's. Files are at most `shard_bytes` large, or one
    tensor. The folder appears complete or not at all.

    Raises ValueError when the program does anything but run whole, unscaled layers one after another, when
    the weights are not finite or the family cannot express the decoder, and FileExistsError when the folder
    is there and not empty.
    """
    if decoder.layer_type is not DecoderLayer:
        raise ValueError(
            f"Layers of type {decoder.layer_type.__name__} are no plain decoder layers, and only those have "
            "a Hugging Face family."
        )
    target = pathlib.Path(os.path.abspath(folder))
    visits = list(range(decoder.config.layers)) if program is None else sequence(program)
    if program is not None and program.depth != decoder.config.layers:
        raise ValueError(
            f"The program is for {program.depth} layers and the model has {decoder.config.layers}."
        )
    windows = tuple(decoder.config.windows[layer] for layer in visits)
    config = dataclasses.replace(decoder.config, layers=len(visits), windows=windows)
    dtype = np.dtype(jax.tree.leaves(decoder.embedding)[0].dtype)
    if dtype not in NAMES:
        raise ValueError(f"Weights of dtype {dtype} have no place in safetensors; cast them to float32.")
    values = config_json(config, dtype)
    _check_free(target)
    work = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        shapes = expected_shapes(abstract(config, dtype), TABLE)
        _write_weights(_plan(decoder, visits), shapes, dtype, work, shard_bytes)
        if tokenizer is not None:
            tokenizer.save(work)
            ends = list(tokenizer.eos)
            values |= {
                "bos_token_id": tokenizer.bos,
                "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
                "pad_token_id": tokenizer.pad,
            }
        _write_json(work / "config.json", values)
        for path in work.iterdir():
            _sync(path)
        _sync(work)
        umask = os.umask(0)
        os.umask(umask)
        work.chmod(0o777 & ~umask)  # mkdtemp makes it private
        _check_free(target)
        os.rename(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    _sync(target.parent)
    return target


def sequence(program: Program) -> list[int]:
    """Returns the layers that a program runs one after another.

    Raises ValueError naming the row and the reason when it is no plain sequence of whole, unscaled layers.
    """
    layers, parts, scales, kinds = (
        np.asarray(table) for table in (program.layer, program.part, program.scale, program.kind)
    )
    visits = []
    for row in range(len(layers)):
        lanes = np.flatnonzero(layers[row] >= 0)
        if not len(lanes):
            continue
        ids = layers[row, lanes].tolist()
        reason = None
        if kinds[row] == CONTINUE:
            reason = "is a Newton iteration"
        elif len(lanes) > 1:
            reason = f"runs layers {', '.join(map(str, ids))} side by side"
        elif parts[row, lanes[0]] != WHOLE:
            reason = f"runs one branch of layer {ids[0]}"
        elif scales[row, lanes[0]] != 1:
            reason = f"scales layer {ids[0]} by {scales[row, lanes[0]]:g}"
        if reason:
            raise ValueError(
                f"Row {row} of the program {reason}, which a Hugging Face folder cannot express; "
                "export takes whole, unscaled layers one after another."
            )
        visits += ids
    if not visits:
        raise ValueError("The program runs no layer, and a Hugging Face model has at least one.")
    return visits


def _plan(decoder: Decoder, visits: Sequence[int]) -> dict[str, Callable[[], np.ndarray]]:
    """Returns what fetches each tensor of the folder, layer after layer."""

    def stored(name: str, path, leaf: jax.Array, layer: int | None) -> np.ndarray:
        array = np.asarray(leaf if layer is None else leaf[layer])
        if not np.isfinite(array).all():
            raise ValueError(f"Tensor {name} holds NaN or infinity, so the model is not exported.")
        return array.T if TABLE[keys(path)].transposed else array

    def keys(path) -> Path:
        return tuple(key.key for key in path)

    plan = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(decoder.embedding):
        name = TABLE[keys(path)].name
        plan[name] = functools.partial(stored, name, path, leaf, None)
    for visit, layer in enumerate(visits):
        apart = isinstance(decoder.layers, tuple)
        tree = decoder.layers[layer] if apart else decoder.layers
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = TABLE[keys(path)].name.format(visit)
            # Sliced when its turn comes: on an accelerator the whole leaf would be copied to the host.
            plan[name] = functools.partial(stored, name, path, leaf, None if apart else layer)
    return plan


def _write_weights(
    plan: Mapping[str, Callable[[], np.ndarray]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    work: pathlib.Path,
    shard_bytes: int,
) -> None:
    sizes = {name: math.prod(shapes[name]) * dtype.itemsize for name in plan}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(map(sizes.__getitem__, files[-1])) + size > shard_bytes:
            files.append([])
        files[-1].append(name)
    places = {}
    for number, names in enumerate(files, 1):
        file = (
            f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        )
        write_tensors(work / file, (plan[name]() for name in names), {n: shapes[n] for n in names}, dtype)
        places.update(dict.fromkeys(names, file))
    if len(files) > 1:
        metadata = {"total_size": sum(sizes.values())}
        _write_json(work / "model.safetensors.index.json", {"metadata": metadata, "weight_map": places})


def _write_json(path: pathlib.Path, values: Mapping) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _check_free(target: pathlib.Path) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder, so {target.name} cannot be written into it.")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists already; name a new folder or remove it first.")


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
