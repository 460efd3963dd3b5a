"""GGUF files: the decoder and the tokenizer, for the architectures llama (Mistral too), qwen2 and qwen3."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxlayers.decoder.config import DecoderConfig, Rope
from jaxlayers.decoder.rope import frequencies
from jaxlayers.decoder.stack import Decoder
from jaxlayers.weights.assemble import Entry, Table, assemble
from jaxlayers.weights.gguf_file import GgufFile
from jaxlayers.weights.strict import quoted
from jaxlayers.weights.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Keys below the architecture that change what the model computes, and the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1.0,),
}
IGNORED = ("rope_freqs.weight", "blk.*.attn_rot_embd.weight")  # what `read_config` takes, and an old constant

_LINEAR = {
    ("attention", "v"): "attn_v",
    ("attention", "out"): "attn_output",
    ("mlp", "gate"): "ffn_gate",
    ("mlp", "up"): "ffn_up",
    ("mlp", "down"): "ffn_down",
}
_NORMS = {
    ("attention_norm",): "attn_norm",
    ("mlp_norm",): "ffn_norm",
    ("attention", "q_norm"): "attn_q_norm",
    ("attention", "k_norm"): "attn_k_norm",
}


def load_gguf(
    path: str | Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[Decoder, Tokenizer]:
    """Returns the decoder and the tokenizer of a GGUF file.

    `dtype` None is the one the matrices are stored in, float32 when they are quantised. Tensors are read and
    dequantised one at a time, straight into the shards of `mesh`. Raises ValueError in one sentence for a
    file that is damaged or describes a model that is not supported, and OSError.
    """
    file = GgufFile(path)
    config = read_config(file)
    try:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if len(file.metadata["tokenizer.ggml.tokens"]) != config.vocab:
        raise ValueError(
            f"{path} has {len(file.metadata['tokenizer.ggml.tokens'])} tokens for an embedding of "
            f"{config.vocab} rows."
        )
    dtype = file.dtype if dtype is None else dtype
    return assemble(
        config, file, table(file.metadata["general.architecture"]), dtype, mesh, IGNORED
    ), tokenizer


def table(architecture: str) -> Table:
    """Returns where the leaves of a decoder are in a file of an architecture."""
    # The converter reorders the query and key rows of this architecture only, for the rotation of neighbours.
    mixed = architecture == "llama"
    heads = {"q": lambda config: config.heads, "k": lambda config: config.kv_heads}
    linear: dict[tuple[str, ...], tuple[str, Any]] = {path: (name, None) for path, name in _LINEAR.items()}
    for name, count in heads.items():
        convert = (lambda a, config, n=count: _half_split(a, n(config))) if mixed else None
        linear["attention", name] = (f"attn_{name}", convert)
    return {
        ("table",): Entry("token_embd.weight"),
        ("norm", "scale"): Entry("output_norm.weight"),
        ("head",): Entry("output.weight"),
        **{(*p, "kernel"): Entry(f"blk.{{}}.{n}.weight", True, c) for p, (n, c) in linear.items()},
        **{(*p, "bias"): Entry(f"blk.{{}}.{n}.bias", False, c) for p, (n, c) in linear.items()},
        **{(*p, "scale"): Entry(f"blk.{{}}.{n}.weight") for p, n in _NORMS.items()},
    }


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows with rotated pairs at (i, i + Q/2) of each head; they come as neighbours (2i, 2i + 1)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def read_config(file: GgufFile) -> DecoderConfig:
    """Returns what the metadata of a file describes.

    Raises ValueError, one sentence naming the key, for an architecture or a setting that is not supported, a
    value that makes no sense, and one that the shapes of the tensors contradict.
    """
    read = _Reader(file)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.where}: architecture {quoted(architecture)} is not supported; "
            f"{', '.join(ARCHITECTURES)} are."
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{file.where} is one part of a split file; join the parts with llama-gguf-split.")
    for key, neutral in NEUTRAL.items():
        if read.value(key) is not None and read.value(key) not in neutral:
            raise read.fault(key, "that is not supported")
    vocab, embed = read.shape("token_embd.weight")
    read.matches("embedding_length", embed)
    layers = read.whole("block_count", most=len(file.shapes))  # so many tensors are there at least
    heads = read.whole("attention.head_count")
    kv_heads = read.whole("attention.head_count_kv", heads)
    (rows, _), (ffw, _) = read.shape("blk.0.attn_q.weight"), read.shape("blk.0.ffn_gate.weight")
    read.matches("feed_forward_length", ffw)
    width = read.whole("attention.key_length", max(rows // heads, 1))
    read.matches("attention.value_length", width, width)
    read.matches("rope.dimension_count", width, width)
    if width * heads != rows:
        raise read.fault(
            "attention.head_count", f"blk.0.attn_q.weight has {rows} rows, not {heads} of {width}"
        )
    window = read.whole("attention.sliding_window", 0, least=0) or None
    biased = lambda name: f"blk.0.{name}.bias" in file.shapes
    family = "mistral" if architecture == "llama" and window else architecture
    try:
        return DecoderConfig(
            vocab=vocab,
            embed=embed,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            ffw=ffw,
            context=read.whole("context_length"),
            norm_eps=read.number("attention.layer_norm_rms_epsilon"),
            rope=_rope(read, width),
            windows=(window,) * layers,
            tied="output.weight" not in file.shapes,
            qkv_bias=architecture == "qwen2" or biased("attn_q"),
            out_bias=biased("attn_output"),
            mlp_bias=biased("ffn_gate"),
            qk_norm=architecture == "qwen3",
            family=family,
        )
    except ValueError as error:
        raise error if str(error).startswith(file.where) else ValueError(f"{file.where}: {error}") from None


def _rope(read: "_Reader", width: int) -> Rope:
    theta = read.number("rope.freq_base", 10_000.0)
    kind = read.value("rope.scaling.type")
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0))
    if kind not in (None, "none", "linear"):
        raise read.fault("rope.scaling.type", "only none and linear are supported")
    if "rope_freqs.weight" in read.file.shapes:
        if kind == "linear" or factor != 1.0:
            raise read.fault("rope.scaling.type", "the file scales RoPE by rope_freqs.weight already")
        context = read.whole("rope.scaling.original_context_length", 8192)
        return _llama3(read.file, theta, width, context)
    return Rope(theta) if kind == "none" or factor == 1.0 else Rope(theta, "linear", factor)


def _llama3(file: GgufFile, theta: float, width: int, context: int) -> Rope:
    """Returns Llama 3.1's stretching, which the file gives as what it divides each frequency by.

    Its one unknown follows from the slowest frequency; all the divisors must then be what the rule makes of
    it. The other constants are those of every published Llama 3.1 to 3.3.
    """
    divisors = file.read("rope_freqs.weight")
    plain = frequencies(Rope(theta), width)
    if divisors.shape != plain.shape or not np.isfinite(divisors).all() or not (divisors > 0).all():
        raise ValueError(f"{file.where}: rope_freqs.weight must hold {len(plain)} finite numbers above 0.")
    rule = Rope(theta, "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_context=context)
    blend = (context * plain[-1] / (2 * math.pi) - rule.low_freq_factor) / (
        rule.high_freq_factor - rule.low_freq_factor
    )
    blend = min(max(blend, 0.0), 1.0)
    rest = 1 / float(divisors[-1]) - blend
    factor = (1 - blend) / rest if rest > 0 and blend < 1 else 1.0
    rule = Rope(theta, "llama3", factor, rule.low_freq_factor, rule.high_freq_factor, context)
    if not np.allclose(plain / frequencies(rule, width), divisors, rtol=1e-5):
        raise ValueError(f"{file.where}: rope_freqs.weight does not follow the rule of Llama 3.1.")
    return rule if factor != 1.0 else Rope(theta)


class _Reader:
    """Typed access to the keys of a file's architecture and to the shapes of its tensors."""

    def __init__(self, file: GgufFile):
        self.file, self._prefix = file, f"{file.metadata.get('general.architecture')}."

    def value(self, key: str) -> Any:
        value = self.file.metadata.get(self._prefix + key)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def fault(self, key: str, rule: str) -> ValueError:
        return ValueError(f"{self.file.where}: {self._prefix}{key} is {quoted(self.value(key))}, but {rule}.")

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value: Any = default if self.value(key) is None else self.value(key)
        if type(value) is not int or not least <= value <= most:
            raise self.fault(key, f"it must be a whole number in {least}..{most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = default if self.value(key) is None else self.value(key)
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise self.fault(key, "it must be a finite number above 0")
        return float(value)

    def matches(self, key: str, due: int, default: int | None = None) -> None:
        if self.whole(key, default) != due:
            raise self.fault(key, f"the tensors and the other keys say {due}")

    def shape(self, name: str) -> tuple[int, int]:
        shape = self.file.shapes.get(name, ())
        if len(shape) != 2:
            found = f"shape {shape}" if shape else "none"
            raise ValueError(f"{self.file.where} must have a tensor {name} with two axes, and has {found}.")
        return shape
