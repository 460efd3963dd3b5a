"""The painters suite: its programs are the paper's, its numbers those of a plain loop, its words computed."""

import json

import checkpoints
import jax
import numpy as np
import pytest

import jaxlayers
from jaxlayers.evaluate import evaluate
from jaxlayers.measure import painters as module
from jaxlayers.measure.painters import (
    LOOPS,
    NAMES,
    claims,
    deletions,
    findings,
    interventions,
    middle,
    order,
    painters,
    sizes,
    swaps,
)
from jaxlayers.program import Program, identity
from jaxlayers.weights.export import export

DEPTH = 5
IDS = [int(i) for i in np.random.default_rng(0).integers(4, 260, 24)]


@pytest.fixture(scope="module")
def decoder():
    return checkpoints.model(layers=DEPTH).decoder


@pytest.fixture(scope="module")
def results(decoder):
    calls = []
    found = painters(decoder, IDS, seeds=3, report=lambda *counts: calls.append(counts))
    assert calls == [(n, found["programs_run"]) for n in range(1, found["programs_run"] + 1)]
    return {"model": "tiny", **found}


# --- the programs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "depth, expected",
    [
        (
            5,
            {
                "skip": {1: "0-1,3-4", 3: "0,4"},
                "middle_repeat": {1: "0-4", 3: "0,2x3,4"},
                "reverse": {1: "0-4", 3: "0,3-1,4"},
                "parallel": {1: "0-4", 3: "0,[1-3]/mean,4"},
                "looped_parallel": {1: "0-1,2x3,3-4", 3: "0,[1-3]/meanx3,4"},
            },
        ),
        (
            6,
            {
                "skip": {2: "0-1,4-5", 4: "0,5"},
                "middle_repeat": {2: "0-1,2x2,4-5", 4: "0,2x4,5"},
                "reverse": {2: "0-1,3-2,4-5", 4: "0,4-1,5"},
                "parallel": {2: "0-1,[2-3]/mean,4-5", 4: "0,[1-4]/mean,5"},
                "looped_parallel": {2: "0-1,[2-3]/meanx3,4-5", 4: "0,[1-4]/meanx3,5"},
            },
        ),
    ],
)
def test_the_programs_are_those_of_the_paper(depth, expected):
    made = interventions(depth, seeds=4)
    assert list(made) == list(NAMES)
    for name, texts in expected.items():
        assert made[name] == {size: [Program.parse(text, depth)] for size, text in texts.items()}, name
    for size, programs in made["random"].items():
        start, stop = middle(depth, size)
        assert len(programs) == 4
        for program in programs:
            run = [int(layer) for layer in program.layer[:, 0]]
            assert run[:start] == list(range(start)) and run[stop + 1 :] == list(range(stop + 1, depth))
            assert sorted(run) == list(range(depth))
    assert interventions(depth, seeds=4) == made


def test_single_layers_and_pairs():
    assert [str(program) for program in deletions(4)] == ["1-3", "0,2-3", "0-1,3", "0-2"]
    pairs = [[1, 0, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2]]
    assert [program.layer[:, 0].tolist() for program in swaps(4)] == pairs


@pytest.mark.parametrize("depth", [3, 4, 5, 30, 81])
def test_the_first_and_last_layers_are_kept_at_every_size(depth):
    assert list(sizes(depth)) == sorted(depth - 2 * kept for kept in range(1, (depth + 1) // 2))
    for size in sizes(depth):
        start, stop = middle(depth, size)
        assert start == depth - 1 - stop >= 1 and stop - start + 1 == size


def test_with_one_layer_changed_parallel_is_the_plain_model(results):
    made = interventions(DEPTH, seeds=2)
    for name in ("parallel", "middle_repeat", "reverse", "random"):
        assert set(made[name][1]) == {identity(DEPTH)}
        assert results["interventions"][name][0]["nll"] == results["nll"]
        assert results["interventions"][name][0]["agreement"] == 1


# --- the numbers --------------------------------------------------------------------------------------------


def by_hand(decoder, name: str, size: int, seed: int) -> tuple[float, np.ndarray]:
    """Returns the loss and the likeliest next tokens, by the paper's words and a loop over layers."""
    tokens = jax.numpy.asarray([IDS])
    ctx = jaxlayers.context(decoder, jaxlayers.positions_of(jax.numpy.ones(tokens.shape, bool)))
    f = lambda i, h: jaxlayers.layer_fn(decoder)(jaxlayers.layer_params(decoder, i), h, ctx)
    kept = (DEPTH - size) // 2
    ids = list(range(kept, DEPTH - kept))
    h = jaxlayers.embed(decoder, tokens)
    for i in range(kept):
        h = f(i, h)
    sequence = {
        "middle_repeat": [ids[(size - 1) // 2]] * size,
        "reverse": ids[::-1],
        "random": [int(i) for i in np.random.default_rng(seed).permutation(ids)],
    }
    for i in sequence.get(name, []):
        h = f(i, h)
    for _ in range({"parallel": 1, "looped_parallel": LOOPS}.get(name, 0)):
        h = sum(f(i, h) for i in ids) / size
    for i in range(DEPTH - kept, DEPTH):
        h = f(i, h)
    logits = np.asarray(jaxlayers.unembed(decoder, h)[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -logprobs[np.arange(len(IDS) - 1), IDS[1:]].mean()
    return float(loss), logits.argmax(axis=-1)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_that_of_a_plain_loop_over_layers(decoder, results, name):
    _, plain = by_hand(decoder, "reverse", 1, 0)
    for point in results["interventions"][name]:
        assert len(point["programs"]) == (3 if name == "random" else 1)
        losses, agreements = [], []
        for seed, program in enumerate(point["programs"]):
            loss, top = by_hand(decoder, name, point["affected"], seed)
            assert program["nll"] == pytest.approx(loss, rel=1e-5)
            losses.append(loss)
            agreements.append((top == plain).mean())
        assert point["agreement"] == pytest.approx(np.mean(agreements))
        expected = np.mean(losses), min(losses), max(losses)
        assert (point["nll"], point["low"], point["high"]) == pytest.approx(expected, rel=1e-5)


def test_single_layers_and_pairs_are_those_of_evaluate(decoder, results):
    rows = [*results["delete"], *results["swap"]]
    assert len(rows) == 2 * DEPTH - 1
    for row in rows:
        loss = evaluate(decoder, IDS, row["program"], window=64).mean_nll
        assert row["nll"] == pytest.approx(loss, rel=1e-5)


def test_two_compilations_run_the_suite_and_equal_programs_run_once(decoder):
    module.reading.clear_cache()
    found = painters(decoder, IDS, seeds=2)
    made = interventions(DEPTH, seeds=2)
    different = {program for curve in made.values() for programs in curve.values() for program in programs}
    assert found["programs_run"] == len({*different, *deletions(DEPTH), *swaps(DEPTH)})
    assert found["compilations"] == 2
    assert painters(decoder, IDS, seeds=2)["compilations"] == 0


def test_a_program_that_overflows_has_no_number_and_is_named(tmp_path, capsys):
    """The middle layers add nearly the largest float32: one can, the sum of both cannot."""
    decoder = checkpoints.model(layers=4).decoder
    down = decoder.layers["mlp"]["down"]["kernel"]
    before = jaxlayers.run(
        decoder, jaxlayers.embed(decoder, np.asarray([IDS])), "0", np.arange(len(IDS))[None]
    )
    after = jaxlayers.run(decoder, before.h, "1m", np.arange(len(IDS))[None])
    strength = 2e38 / float(abs(after.h - before.h).max())
    decoder.layers["mlp"]["down"]["kernel"] = down.at[1].multiply(strength)
    decoder = jaxlayers.Decoder(
        decoder.embedding,
        jax.tree.map(lambda a: a.at[2].set(a[1]), decoder.layers),
        decoder.config,
    )
    found = {"model": "tiny", **painters(decoder, IDS, seeds=2)}
    text = "0,[1-2]/mean,3"
    assert text in found["not_finite"] and "0-3" not in found["not_finite"]
    (point,) = found["interventions"]["parallel"]
    assert point["nll"] is point["low"] is point["high"] is point["agreement"] is None
    assert "parallel" not in found["order"][0]["worst_first"]
    (claim,) = (each for each in found["claims"] if each["worse"] == "parallel")
    assert claim["open"] == [2]
    assert any("No finite loss" in line and text in line for line in found["findings"])
    module.write(found, tmp_path)
    assert json.loads((tmp_path / "painters.json").read_text()) == found
    module.show(found)
    assert "NaN" in capsys.readouterr().out


def test_refusals(decoder):
    with pytest.raises(ValueError, match="seeds must be at least 1, not 0"):
        painters(decoder, IDS, seeds=0)
    with pytest.raises(ValueError, match="has 1 token; from 2"):
        painters(decoder, IDS[:1])
    with pytest.raises(ValueError, match="context of 256"):
        painters(decoder, IDS * 20)
    with pytest.raises(ValueError, match="vocabulary"):
        painters(decoder, [5, 1000])
    broken = jax.tree.map(lambda a: a * np.nan, decoder)
    with pytest.raises(ValueError, match="the plain model, program 0-4, gives a loss of nan"):
        painters(broken, IDS, seeds=1)


# --- what the numbers say -----------------------------------------------------------------------------------


def made_up(**changes: list[float | None]) -> dict:
    """Results of a model of 6 layers with a loss of 1, by the changes at 2 and 4 layers."""

    def points(values: list[float | None]) -> list[dict]:
        return [
            {"affected": size, "nll": None if value is None else 1 + value, "agreement": 0.5}
            for size, value in zip((2, 4), values, strict=True)
        ]

    curves = {name: points(changes.get(name, [0.1, 0.2])) for name in NAMES}
    alone = lambda costs: [{"nll": 1 + cost} for cost in costs]
    made = {"layers": 6, "nll": 1.0, "interventions": curves, "not_finite": []}
    made |= {"delete": alone([3, 0.5, 0.05, 0.3, 0.4, 1]), "swap": alone([2, 0.01, 0.2, 0.6, 0.7])}
    made["order"] = order(made)
    made["claims"] = claims(made)
    return made


def test_claims_and_findings_are_computed():
    made = made_up(
        skip=[0.5, 3.0],
        middle_repeat=[0.9, 2.0],
        reverse=[0.4, 0.8],
        random=[0.4, 0.6],
        parallel=[0.3, 0.4],
        looped_parallel=[0.35, None],
    )
    assert made["order"][0]["worst_first"][0] == "middle_repeat"
    assert made["order"][1]["worst_first"] == ["skip", "middle_repeat", "reverse", "random", "parallel"]
    places = [(each["holds"], each["fails"], each["open"]) for each in made["claims"]]
    assert places == [([2], [], [4]), ([4], [], [2]), ([], [2], [4])]
    said = " ".join(findings(made))
    assert '"Middle Repeat is the worst" holds here for 1 of 1 size of the middle.' in said
    assert (
        '"Looped Parallel is better than Parallel" holds here for 0 of 1 size of the middle, not for 2.'
        in said
    )
    assert "With 2 of 6 layers changed (layers 2-3)" in said
    assert "Middle Repeat +0.900 (50 %), Skip +0.500 (50 %), " in said
    assert "costs most at layer 0 (+3.000) and least at layer 2 (+0.050); 1 of 6 cost less than 0.1" in said
    assert "costs most at layers 0 and 1 (+2.000) and least at layers 1 and 2 (+0.010); 1 of 5" in said
    assert "for 1 of 5 pairs" in said

    worse = made_up(skip=[0.5, 3.0], middle_repeat=[0.9, 2.0])
    assert worse["claims"][0]["fails"] == [4]
    assert "holds here for 1 of 2 sizes of the middle, not for 4 (the worst there: Skip)" in " ".join(
        findings(worse)
    )
    assert '"Random Order is better than Reverse" cannot be told here' in " ".join(findings(worse))


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_writes_both_files(cli, result, tiny_folder, tiny_text, tmp_path):
    out = tmp_path / "new" / "out"
    words = ["painters", tiny_folder, "--seeds", 2, "--tokens", 40, "--text", tiny_text, "--out", out]
    found = result(*words)
    assert sorted(path.name for path in out.iterdir()) == ["painters.json", "painters.png"]
    assert (out / "painters.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((out / "painters.json").read_text(), parse_constant=pytest.fail)
    assert (found["out"], found["tokens"], found["layers"]) == (str(out), 40, 4)
    assert [each["affected"] for each in found["order"]] == [2]
    assert len(found["claims"]) == 3 and found["findings"]
    for key in set(found) - {"out", "seconds", "compilations"}:
        assert written[key] == found[key]
    assert set(written) - set(found) == {"interventions", "delete", "swap"}

    status, shown, _ = cli(*words)
    assert status == 0 and "\x1b" not in shown
    for name in NAMES.values():
        assert name.split()[0] in shown
    assert "A swap costs less" in shown


def test_the_built_in_text(result, tiny_folder, tmp_path):
    found = result("painters", tiny_folder, "--seeds", 1, "--tokens", 1000, "--out", tmp_path)
    assert found["tokens"] == 256  # the model's context


def test_wrong_input_is_one_sentence_and_leaves_no_folder(refused, tiny_folder, tiny_text, tmp_path):
    out = tmp_path / "out"
    command = lambda model, *words: ("painters", model, "--out", out, *words)
    for layers in (1, 2):
        shallow = checkpoints.folder(tmp_path / f"of{layers}", layers=layers)
        refused(*command(shallow), needles=[f"has {layers} layer", "at least 3"])
    bare = export(checkpoints.model().decoder, None, tmp_path / "bare")
    refused(*command(bare), needles=["no tokenizer"])
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("a")
    refused(*command(tiny_folder, "--text", empty), needles=["empty"])
    refused(*command(tiny_folder, "--text", short), needles=["1 token"])
    refused(*command(tiny_folder, "--tokens", 1), needles=["--tokens must be at least 2, not 1"])
    refused(*command(tiny_folder, "--seeds", 0), needles=["--seeds must be at least 1, not 0"])
    assert not out.exists()
    refused("painters", tiny_folder, "--out", tiny_text, needles=[str(tiny_text)])
    refused("painters", tiny_folder, "--out", tiny_text / "under", needles=[str(tiny_text)])


def test_an_interrupt_leaves_no_folder(cli, tiny_folder, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "painters", interrupted)
    status, out, _ = cli("painters", tiny_folder, "--out", tmp_path / "out")
    assert (status, out) == (130, "")
    assert not (tmp_path / "out").exists()
