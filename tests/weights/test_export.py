"""Exported folders: transformers loads them, and their logits are those of the program."""

import json
import os
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlayers.decoder.config import DecoderConfig, Rope
from jaxlayers.decoder.layer import DecoderLayer
from jaxlayers.decoder.stack import (
    context,
    embed,
    init,
    layer_fn,
    layer_params,
    per_layer,
    positions_of,
    unembed,
    window_indices,
)
from jaxlayers.program import Program
from jaxlayers.weights.export import export, sequence
from jaxlayers.weights.hf import load_folder, read_config

SIZES: dict[str, Any] = dict(
    vocab=50, embed=16, layers=4, heads=4, kv_heads=2, head_width=6, ffw=24, context=64
)
CONFIGS = {
    "llama": DecoderConfig(
        **SIZES, rope=Rope(500.0, "llama3", 4.0, 1.0, 4.0, 16), out_bias=True, qkv_bias=True
    ),
    "llama-linear-tied": DecoderConfig(**SIZES, rope=Rope(1e4, "linear", 2.0), tied=True, mlp_bias=True),
    "mistral": DecoderConfig(**SIZES, windows=(5,) * 4, family="mistral"),
    "qwen2": DecoderConfig(**SIZES, windows=(None, 5, None, 5), qkv_bias=True, family="qwen2", norm_eps=1e-5),
    "qwen3": DecoderConfig(**SIZES, windows=(5, None, None, 5), qk_norm=True, tied=True, family="qwen3"),
}
PROGRAMS = {"skip": "0,3", "repeat": "0-1,(1-2)x2,3x3", "reverse": "3-0", "one": "2"}
ORDERS = {"skip": [0, 3], "repeat": [0, 1, 1, 2, 1, 2, 3, 3, 3], "reverse": [3, 2, 1, 0], "one": [2]}


def model_of(name: str, dtype=jnp.float32):
    decoder = init(CONFIGS[name], jax.random.key(1), dtype)
    # Norms start at 1 and biases at 0, which would hide a mix-up.
    leaves, tree = jax.tree.flatten(decoder)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noise = lambda x, key: x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
    return tree.unflatten(map(noise, leaves, keys))


def logits_in_order(decoder, order, tokens):
    """The layers one after another in a Python loop, never by `run`."""
    positions = positions_of(jnp.ones(tokens.shape, bool))
    h, ctx = embed(decoder, tokens), context(decoder, positions)
    windows, apply = window_indices(decoder.config), layer_fn(decoder)
    for layer in order:
        h = apply(layer_params(decoder, layer), h, ctx._replace(window=windows[layer]))
    return unembed(decoder, h)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_the_program(tmp_path, name, program):
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    decoder, order = model_of(name), ORDERS[program]
    folder = export(decoder, Program.parse(PROGRAMS[program], 4), tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert model.config.num_hidden_layers == len(order)
    assert model.dtype == torch.float32
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    ours = logits_in_order(decoder, order, jnp.asarray(tokens))
    np.testing.assert_allclose(theirs, np.asarray(ours), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_program_comes_back_as_its_layers(tmp_path, name):
    decoder, order = model_of(name), ORDERS["repeat"]
    folder = export(decoder, Program.parse(PROGRAMS["repeat"], 4), tmp_path / "out")
    loaded = load_folder(folder)
    assert loaded.config.windows == tuple(decoder.config.windows[i] for i in order)
    for visit, layer in enumerate(order):
        jax.tree.map(np.testing.assert_array_equal, layer_params(loaded, visit), layer_params(decoder, layer))
    jax.tree.map(np.testing.assert_array_equal, loaded.embedding, decoder.embedding)


def test_config_names_every_layer_in_both_spellings(tmp_path):
    folder = export(model_of("qwen2"), Program.parse("1x3,0", 4), tmp_path / "out")
    values = json.loads((folder / "config.json").read_text())
    assert values["num_hidden_layers"] == 4
    assert values["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert values["max_window_layers"] == 0
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e4
    assert values["torch_dtype"] == values["dtype"] == "float32"
    folder = export(model_of("llama"), None, tmp_path / "llama")
    new = json.loads((folder / "config.json").read_text())
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    (folder / "config.json").write_text(json.dumps(old))
    assert read_config(folder) == CONFIGS["llama"]
    new = {
        key: value for key, value in new.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    (folder / "config.json").write_text(json.dumps(new))
    assert read_config(folder) == CONFIGS["llama"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_kept(tmp_path, dtype):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    decoder = model_of("llama-linear-tied", dtype)
    folder = export(decoder, None, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    table = model.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(table, np.asarray(decoder.embedding["table"], np.float32))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_large_models_are_sharded(tmp_path):
    decoder = model_of("qwen3")
    folder = export(decoder, None, tmp_path / "out", shard_bytes=5000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    jax.tree.map(np.testing.assert_array_equal, load_folder(folder), decoder)


def test_layers_kept_apart_are_exported_too(tmp_path):
    decoder = model_of("qwen2")
    export(decoder, None, tmp_path / "a")
    export(per_layer(decoder), None, tmp_path / "b")
    a, b = (tmp_path / x / "model.safetensors" for x in "ab")
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    "program, needles",
    [
        ("0,[1,2],3", ["Row 1", "side by side", "1, 2"]),
        ("0-1,[2+3]", ["Row 2", "side by side"]),
        ("0,[1-2]@2", ["Row 1", "side by side"]),
        ("0,1,2a", ["Row 2", "one branch of layer 2"]),
        ("0,1m", ["Row 1", "one branch of layer 1"]),
        ("0,3*0.5", ["Row 1", "scales layer 3 by 0.5"]),
    ],
)
def test_programs_that_are_no_sequence_are_refused(tmp_path, program, needles):
    with pytest.raises(ValueError) as caught:
        export(model_of("llama"), Program.parse(program, 4), tmp_path / "out")
    assert all(needle in str(caught.value) for needle in needles)
    assert not list(tmp_path.iterdir())


def test_padding_and_one_lane_rows_do_not_matter():
    program = Program.parse("0,[1],[2]/mean,3", 4)
    assert sequence(program.pad(rows=9, lanes=3)) == [0, 1, 2, 3]


def test_another_depth_is_refused(tmp_path):
    with pytest.raises(ValueError, match="8 layers and the model has 4"):
        export(model_of("llama"), Program.parse("0-7", 8), tmp_path / "out")


def test_a_decoder_that_the_family_cannot_express_is_refused(tmp_path):
    config = DecoderConfig(**SIZES, windows=(5, None, 5, 5), family="mistral")
    with pytest.raises(ValueError, match="mistral"):
        export(init(config, jax.random.key(0)), None, tmp_path / "out")
    # The same decoder can still give the layers that agree.
    export(init(config, jax.random.key(0)), Program.parse("0,2-3", 4), tmp_path / "out")


def test_other_layers_are_refused(tmp_path):
    class Other(DecoderLayer):
        pass

    with pytest.raises(ValueError, match="Other"):
        export(init(CONFIGS["llama"], jax.random.key(0), layer_type=Other), None, tmp_path / "out")


def test_an_existing_folder_is_kept(tmp_path):
    decoder, out = model_of("llama"), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out"):
        export(decoder, None, out)
    assert [p.name for p in out.iterdir()] == ["notes.txt"]
    (out / "notes.txt").unlink()
    export(decoder, None, out)
    assert (out / "config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FileNotFoundError, match="gone"):
        export(decoder, None, tmp_path / "gone" / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_an_interrupt_leaves_nothing(tmp_path, error):
    class Broken:
        bos, eos, pad = None, (), None

        def save(self, folder):
            (folder / "tokenizer.json").write_text("half")
            raise error("stop")

    with pytest.raises(error):
        export(model_of("llama"), None, tmp_path / "out", cast(Any, Broken()))
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_refused(tmp_path):
    decoder = model_of("llama")
    decoder.layers["mlp"]["up"]["kernel"] = decoder.layers["mlp"]["up"]["kernel"].at[2, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        export(decoder, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_folder_has_ordinary_permissions(tmp_path):
    folder = export(model_of("llama"), None, tmp_path / "out")
    plain = tmp_path / "plain"
    plain.mkdir()
    assert os.stat(folder).st_mode == os.stat(plain).st_mode


def test_the_tokenizer_goes_along(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from jaxlayers.weights.hub import load
    from jaxlayers.weights.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    export(model_of("llama"), None, tmp_path / "out", Tokenizer(backend, bos=0, eos=[1]))
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (0, 1, None)
    tokenizer = load(tmp_path / "out").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("a b") == [2, 3]
    assert (tokenizer.bos, tokenizer.eos) == (0, (1,))
