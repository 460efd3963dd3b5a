"""Hugging Face folders: config.json and safetensors, for the Llama, Mistral, Qwen2 and Qwen3 families."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxlayers.decoder.config import DecoderConfig, Rope
from jaxlayers.decoder.stack import Decoder
from jaxlayers.weights.assemble import Entry, Table, assemble
from jaxlayers.weights.strict import quoted, read_json
from jaxlayers.weights.tensor_file import TensorFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers takes for a key that is absent; a head_dim or num_key_value_heads of None is derived.
DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
}
# Keys that change what the model computes and that no decoder here follows.
REFUSED = ("quantization_config", "num_experts", "num_local_experts")
MOST_LAYERS = 4096
IGNORED = ("*.rotary_emb.inv_freq",)  # old checkpoints store what RoPE computes

_LINEAR = {
    ("attention", "q"): "self_attn.q_proj",
    ("attention", "k"): "self_attn.k_proj",
    ("attention", "v"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
}
_NORMS = {
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
}
# One table for all families: a config says which of the leaves there are.
TABLE: Table = {
    ("table",): Entry("model.embed_tokens.weight"),
    ("norm", "scale"): Entry("model.norm.weight"),
    ("head",): Entry("lm_head.weight"),
    **{(*p, "kernel"): Entry(f"model.layers.{{}}.{n}.weight", transposed=True) for p, n in _LINEAR.items()},
    **{(*p, "bias"): Entry(f"model.layers.{{}}.{n}.bias") for p, n in _LINEAR.items()},
    **{(*p, "scale"): Entry(f"model.layers.{{}}.{n}.weight") for p, n in _NORMS.items()},
}


def read_config(folder: str | Path) -> DecoderConfig:
    """Returns what config.json in the folder describes, in the spelling of transformers 4 or 5.

    Raises ValueError, one sentence naming the key and its value, for a model that is not supported or a
    value that makes no sense, and FileNotFoundError when there is no config.json.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    return parse_config(read_json(path), str(path))


class _Reader:
    """Typed access to a config with the family's defaults."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str):
        self.values, self.defaults, self.where = values, defaults, where

    def fault(self, key: str, rule: str) -> ValueError:
        return ValueError(f"{self.where}: {key} is {quoted(self.raw(key))}, but {rule}.")

    def raw(self, key: str) -> Any:
        return self.values.get(key, self.defaults.get(key))

    def whole(self, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.raw(key)
        if type(value) is not int or not least <= value <= most:
            raise self.fault(key, f"it must be a whole number in {least}..{most}")
        return value

    def number(self, key: str) -> float:
        value = self.raw(key)
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise self.fault(key, "it must be a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if type(value) is not bool:
            raise self.fault(key, "it must be true or false")
        return value


def parse_config(values: Mapping[str, Any], where: str = "config") -> DecoderConfig:
    """Returns the decoder that the content of a config.json describes; raises ValueError as `read_config`."""
    family = _family(values, where)
    read = _Reader(values, {**DEFAULTS, **FAMILY_DEFAULTS[family]}, where)
    for key in REFUSED:
        if values.get(key) is not None:
            raise read.fault(key, "that is not supported; use a dense checkpoint in floats")
    if read.raw("hidden_act") not in ("silu", "swish"):
        raise read.fault("hidden_act", "only silu is supported")
    layers = read.whole("num_hidden_layers", most=MOST_LAYERS)
    embed, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    if read.raw("head_dim") is None and embed % heads:
        raise read.fault(
            "hidden_size", f"num_attention_heads {heads} does not divide it and there is no head_dim"
        )
    head_width = embed // heads if read.raw("head_dim") is None else read.whole("head_dim")
    kv_heads = heads if read.raw("num_key_value_heads") is None else read.whole("num_key_value_heads")
    out_bias = family in ("llama", "qwen3") and read.flag("attention_bias")
    context = read.whole("max_position_embeddings")
    try:
        return DecoderConfig(
            vocab=read.whole("vocab_size"),
            embed=embed,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            ffw=read.whole("intermediate_size"),
            context=context,
            norm_eps=read.number("rms_norm_eps"),
            rope=_rope(values, where, context),
            windows=_windows(read, family, layers),
            tied=read.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2" or out_bias,
            out_bias=out_bias,
            mlp_bias=family == "llama" and read.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            family=family,
        )
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None


def _family(values: Mapping[str, Any], where: str) -> str:
    kind, architectures = values.get("model_type"), values.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if architectures:
        names = {name: family for family, name in ARCHITECTURES.items()}
        name = architectures[0] if isinstance(architectures, list) else None
        if not isinstance(name, str) or name not in names:
            raise ValueError(
                f"{where}: architectures is {quoted(architectures)}, but only causal language models of the "
                f"families {known} are supported."
            )
        kind = names[name] if kind is None else kind
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"{where}: model_type is {quoted(kind)}, but only {known} are supported.")
    if architectures and architectures[0] != ARCHITECTURES[kind]:
        raise ValueError(f"{where}: architectures {quoted(architectures)} does not fit model_type {kind!r}.")
    return kind


def _rope(values: Mapping[str, Any], where: str, context: int) -> Rope:
    # transformers 5 writes rope_parameters with the theta inside; 4 writes rope_theta and rope_scaling.
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    inner = values.get(key)
    inner = {} if inner is None else inner
    if not isinstance(inner, dict):
        raise ValueError(f"{where}: {key} is {quoted(inner)}, but it must be an object or null.")
    if any(isinstance(value, dict) for value in inner.values()):
        raise ValueError(
            f"{where}: {key} is {quoted(inner)}, but RoPE that differs by layer is not supported."
        )
    outer = {
        name: values[name] for name in ("rope_theta", "partial_rotary_factor") if values.get(name) is not None
    }
    # transformers 5 reads the legacy key `type` only where rope_type is absent.
    inner = {"rope_type": inner.get("type", "default"), "rope_theta": 10_000.0, **outer, **inner}
    # Of this one, transformers prefers what stands at the top level.
    if values.get("original_max_position_embeddings") is not None:
        inner["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    read = _Reader(inner, {"original_max_position_embeddings": context}, f"{where}, {key}")
    kind = read.raw("rope_type")
    if kind not in ("default", "linear", "llama3"):
        raise read.fault("rope_type", "only default, linear and llama3 are supported")
    if read.raw("partial_rotary_factor") not in (None, 1):
        raise read.fault("partial_rotary_factor", "only RoPE over the whole head is supported")
    theta = read.number("rope_theta")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, read.number("factor"))
    return Rope(
        theta,
        kind,
        read.number("factor"),
        read.number("low_freq_factor"),
        read.number("high_freq_factor"),
        read.whole("original_max_position_embeddings"),
    )


def _windows(read: _Reader, family: str, layers: int) -> tuple[int | None, ...]:
    window = None
    if family == "mistral" or (family.startswith("qwen") and read.flag("use_sliding_window")):
        window = None if read.raw("sliding_window") is None else read.whole("sliding_window")
    sliding = [window is not None] * layers
    if family.startswith("qwen") and window is not None:
        first = read.whole("max_window_layers", least=0)
        sliding = [i >= first for i in range(layers)]
    kinds = read.raw("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise read.fault("layer_types", f"it must be a list with an entry for each of {layers} layers")
        names = {"full_attention": False, "sliding_attention": True}
        if not all(isinstance(kind, str) and kind in names for kind in kinds):
            raise read.fault("layer_types", "only full_attention and sliding_attention are supported")
        listed = [names[kind] for kind in kinds]
        if any(listed) and window is None:
            raise read.fault("layer_types", "it asks for sliding_attention and the config sets no window")
        if not family.startswith("qwen") and listed != sliding:
            raise read.fault("layer_types", f"{family} has the same window in every layer")
        sliding = listed
    return tuple(window if slides else None for slides in sliding)


class Folder:
    """The safetensors files of a folder as one `assemble.Source`."""

    def __init__(self, folder: Path):
        self.where = str(folder)
        self._files: dict[str, TensorFile] = {}
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():
            file = TensorFile(single)
            self._files = dict.fromkeys(file.shapes, file)
        elif index.is_file():
            self._files = _shards(folder, index)
        elif list(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                f"{folder} holds its weights as pickle (pytorch_model.bin), which is never read because it "
                "can run code; convert it with transformers: from_pretrained, then save_pretrained."
            )
        else:
            raise FileNotFoundError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json; weights in "
                "other formats are not read."
            )
        self.shapes = {name: file.shapes[name] for name, file in self._files.items()}

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The narrowest dtype that holds every float tensor."""
        found = {file.slots[name].dtype for name, file in self._files.items()}
        floats = sorted((d for d in found if jnp.issubdtype(d, jnp.floating)), key=str)
        return functools.reduce(jnp.promote_types, floats) if floats else np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        """Returns a read-only view of the mapped file."""
        return self._files[name].read(name)


def _shards(folder: Path, index: Path) -> dict[str, TensorFile]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} has no weight_map from tensor names to files.")
    files: dict[str, TensorFile] = {}
    for shard in names.values():
        # A plain name only: the index must not lead out of the folder.
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & set("/\\\0:"):
            raise ValueError(
                f"{index} names the file {quoted(shard)}, which is no plain .safetensors file name."
            )
        if shard not in files:
            if not (folder / shard).is_file():
                raise FileNotFoundError(
                    f"{index} names the file {quoted(shard)}, which is not in the folder."
                )
            files[shard] = TensorFile(folder / shard)
    for name, shard in names.items():
        if name not in files[shard].shapes:
            raise ValueError(f"{index} places tensor {quoted(name)} in {shard}, which does not hold it.")
    for shard, file in files.items():
        for name in file.shapes:
            if names.get(name) != shard:
                raise ValueError(
                    f"{file.where} holds tensor {quoted(name)}, which the index does not place there."
                )
    return {name: files[shard] for name, shard in names.items()}


def load_folder(folder: str | Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> Decoder:
    """Returns the decoder in a Hugging Face folder, in the dtype of its tensors unless one is given.

    With a mesh the weights go straight into shards. Raises ValueError or OSError, one sentence naming the
    file and the tensor or key.
    """
    folder = Path(folder)
    config = read_config(folder)
    source = Folder(folder)
    dtype = source.dtype if dtype is None else np.dtype(dtype)
    # float64 is float32 unless jax runs in 64 bits.
    return assemble(config, source, TABLE, jax.dtypes.canonicalize_dtype(dtype), mesh, IGNORED)


def config_json(config: DecoderConfig, dtype: DTypeLike) -> dict[str, Any]:
    """Returns the content of config.json, in words that transformers 4 and 5 both read.

    Raises ValueError when the family has no way to say it.
    """
    rope = config.rope
    scaling: dict[str, Any] = {}
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES.get(config.family)],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffw,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta, **scaling},
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "dtype": np.dtype(dtype).name,
        "torch_dtype": np.dtype(dtype).name,
        # Without these transformers would take the family's own ids.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    widths = {window for window in config.windows if window is not None}
    window = min(widths, default=None)
    if config.family == "mistral":
        values["sliding_window"] = window
    if config.family.startswith("qwen"):
        slides = [w is not None for w in config.windows]
        values |= {
            "use_sliding_window": any(slides),
            "sliding_window": window,
            "max_window_layers": slides.index(True) if any(slides) else config.layers,
            "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        }
    if parse_config(json.loads(json.dumps(values)), "exported config") != config:
        raise ValueError(
            f"The Hugging Face family {config.family!r} cannot express this decoder's biases, norms or "
            f"windows {quoted(sorted(widths))}."
        )
    return values
