"""The program table, its text form, builders and mergekit, against a second reading of the text."""

import re

import jax
import numpy as np
import pytest
import yaml
from grammar import steps
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import program_texts

from jaxlayers import program as programs
from jaxlayers.plot import program_figure
from jaxlayers.program import ATTENTION, CONTINUE, MEAN, MLP, SUM, WHOLE, Program

DEPTH = 30


# --- the table that a text stands for ----------------------------------------------------------------


BRANCHES = {"am": WHOLE, "a": ATTENTION, "m": MLP}


def expand(text: str) -> list[tuple[int, list[list[tuple[int, int]]], float]]:
    """Rows of (kind, lanes, scale) of a valid text."""
    rows = []
    for step in steps(text):
        lanes = [[(layer, BRANCHES[branches]) for layer, branches in lane] for lane in step.lanes]
        rows += [(MEAN if step.mean and len(lanes) > 1 else SUM, lanes, step.scale)]
        rows += [(CONTINUE, lanes, step.scale)] * (step.iterations - 1)
    return rows


def table(rows: list[tuple[int, list[list[tuple[int, int]]], float]]) -> list[tuple]:
    """The rows with a slot for every visit with attention, as the table stores them."""
    out, slot = [], 0
    for kind, lanes, scale in rows:
        row = []
        for group, lane in enumerate(lanes):
            for layer, part in lane:
                row.append((layer, part, float(np.float32(scale)), group, -1 if part == MLP else slot))
                slot += part != MLP
        out.append((kind, row))
    return out


def read_table(program: Program) -> list[tuple]:
    """The same, read from the arrays of a program."""
    columns = [
        np.asarray(x) for x in (program.layer, program.part, program.scale, program.group, program.slot)
    ]
    out = []
    for row in range(program.rows):
        keep = np.flatnonzero(columns[0][row] >= 0)
        if len(keep):
            cells = [tuple(column[row, i].item() for column in columns) for i in keep]
            out.append((int(np.asarray(program.kind)[row]), cells))
    return out


@settings(max_examples=300, deadline=None)
@given(program_texts(DEPTH))
def test_parse_agrees_with_an_independent_expander(text):
    program, rows = Program.parse(text, DEPTH), expand(text)
    assert read_table(program) == table(rows)
    cells = [visit for _, lanes, _ in rows for lane in lanes for visit in lane]
    assert program.visits == len(cells)
    assert program.layers == tuple(sorted({layer for layer, _ in cells}))
    assert program.slots == sum(part != MLP for _, part in cells)
    assert program.rows == len(rows)
    newton = any(kind == CONTINUE for kind, _, _ in rows)
    assert program.lanes == max(2 if newton else 1, max(sum(map(len, lanes)) for _, lanes, _ in rows))
    padding = np.asarray(program.layer) < 0
    assert (np.asarray(program.scale)[padding] == 1).all()
    for column in (program.part, program.group, program.slot):
        assert (np.asarray(column)[padding] == -1).all()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6).flatmap(lambda depth: st.tuples(program_texts(depth), st.just(depth))))
def test_canonical_text_round_trips(case):
    text, depth = case
    program = Program.parse(text, depth)
    again = Program.parse(str(program), depth)
    assert again == program and hash(again) == hash(program)
    assert str(again) == str(program)
    assert read_table(again) == read_table(program)
    assert not re.search(r"\s", str(program))
    assert eval(repr(program), {"Program": lambda text, depth: Program.parse(text, depth)}) == program
    padded = program.pad(program.rows + 2, program.lanes + 1, program.slots + 3)
    assert padded == program and str(padded) == str(program) and len({padded, program}) == 1


@settings(max_examples=300, deadline=None)
@given(program_texts(2), program_texts(2))
def test_equal_means_equal_text(a, b):
    a, b = Program.parse(a, 2), Program.parse(b, 2)
    assert (a == b) == (str(a) == str(b))
    assert a != Program.parse(str(a), 3)


MUTATIONS = "0123456789,-+()[]/@x*. amefusdn\nE²٣é#\x00"


@settings(max_examples=500, deadline=None)
@given(program_texts(8), st.data())
def test_mutated_text_parses_or_raises_one_sentence(text, data):
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", *MUTATIONS]))
            + text[at + data.draw(st.integers(0, 2)) :]
        )
    try:
        program = Program.parse(text, 8)
    except ValueError as error:
        assert type(error) is ValueError
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 300
    else:
        assert Program.parse(str(program), 8) == program


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_parses_or_raises_one_sentence(text):
    try:
        Program.parse(text, 8)
    except ValueError as error:
        assert type(error) is ValueError and len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "canonical", "rows", "lanes", "slots", "visits"),
    [
        ("0-29", "0-29", 30, 1, 30, 30),
        ("29-0", "29-0", 30, 1, 30, 30),
        ("0-9,12-29", "0-9,12-29", 28, 1, 28, 28),
        ("8x3", "8x3", 3, 1, 3, 3),
        ("8x1*1", "8", 1, 1, 1, 1),
        ("0-7,8x3,9-29", "0-7,8x3,9-29", 32, 1, 32, 32),
        ("(10-14)x2", "10-14,10-14", 10, 1, 10, 10),
        ("0-14,(10-14),15-29", "0-14,10-29", 35, 1, 35, 35),
        ("[10-13]", "[10-13]", 1, 4, 4, 4),
        ("[10-13]/mean", "[10-13]/mean", 1, 4, 4, 4),
        ("[10-13]/fused", "[10-13]/fused", 1, 4, 4, 4),
        ("[10+11+12+13]", "[10-13]/fused", 1, 4, 4, 4),
        ("[12,10-11]/fused", "[12,10-11]/fused", 1, 3, 3, 3),
        ("[10-13]@1", "[10-13]", 1, 4, 4, 4),
        ("[10-13]@2", "[10-13]@2", 2, 4, 8, 8),
        ("[10+11,12+13]@2", "[10+11,12+13]@2", 2, 4, 8, 8),
        ("[10+11]/mean", "[10-11]/fused", 1, 2, 2, 2),
        ("[10+11]@2", "[10+11]@2", 2, 2, 4, 4),
        ("[10]", "10", 1, 1, 1, 1),
        ("[10]/mean", "10", 1, 1, 1, 1),
        ("[10]@3", "[10]@3", 3, 2, 3, 3),
        ("10,[10]@2", "10,[10]@2", 3, 2, 3, 3),
        ("[10a,11m]/fused", "[10a,11m]/fused", 1, 2, 1, 2),
        ("12a,12m", "12a,12m", 2, 1, 1, 2),
        ("12a x2", "12ax2", 2, 1, 2, 2),
        ("10,11", "10-11", 2, 1, 2, 2),
        ("7,8,8,9", "7,8x2,9", 4, 1, 4, 4),
        ("(10-14)*0.7", "10-14*0.7", 5, 1, 5, 5),
        ("((10-14)*0.5,3)*-2", "10-14*-1,3*-2", 6, 1, 6, 6),
        ("([10-13]@2)x2*0.5", "[10-13]@2x2*0.5", 4, 4, 16, 16),
        ("12*0.30000001192092896", "12*0.3", 1, 1, 1, 1),
        ("12*-0.0", "12*0", 1, 1, 1, 1),
        ("0012", "12", 1, 1, 1, 1),
    ],
)
def test_examples(text, canonical, rows, lanes, slots, visits):
    program = Program.parse(text, 30)
    assert str(program) == canonical
    assert (program.rows, program.lanes, program.slots, program.visits) == (rows, lanes, slots, visits)


@pytest.mark.parametrize(
    "text",
    [
        "0-29",
        "0-9,12-29",
        "0-14,(10-14),15-29",
        "0-4,9-5,10-29",
        "0-9,[10-13],14-29",
        "0-9,[10-13]/mean,14-29",
        "0-9,[10-13]@2,14-29",
        "0-9,[10-13]@4,14-29",
        "0-9,[10-13]/fused,14-29",
        "0-9,10a,11m,12-29",
        "0-14,(10-14)*0.7,15-29",
        "0-9,[10+11,12+13]@2,14-29",
        "0-9,[13-10]@2,14-29",
    ],
)
def test_measured_programs_parse(text):
    program = Program.parse(text, 30)
    assert Program.parse(str(program), 30) == program


def test_table_of_a_newton_row():
    program = Program.parse("0,[1+2,3]@2,4m", 5)
    np.testing.assert_array_equal(program.layer, [[0, -1, -1], [1, 2, 3], [1, 2, 3], [4, -1, -1]])
    np.testing.assert_array_equal(program.group, [[0, -1, -1], [0, 0, 1], [0, 0, 1], [0, -1, -1]])
    np.testing.assert_array_equal(program.slot, [[0, -1, -1], [1, 2, 3], [4, 5, 6], [-1, -1, -1]])
    np.testing.assert_array_equal(program.kind, [SUM, SUM, CONTINUE, SUM])
    assert [x.dtype for x in jax.tree.leaves(program)] == [np.int32, np.int32, np.float32] + [np.int32] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty: name at least one layer"),
        (" \n", "is empty"),
        ("1,", "character 3: an item is missing"),
        (",1", "character 1: an item is missing"),
        ("1,,2", "character 3: an item is missing"),
        ("()", "character 2: an item is missing"),
        ("[]", "character 2: a lane is missing"),
        ("[1,]", "character 4: a lane is missing"),
        ("[1,[2]]", "item '[' at character 4: '[' cannot stand inside [ ]"),
        ("[(1)]", "item '(' at character 2: '(' cannot stand inside [ ]"),
        ("0-9,[1]@0", "item '[1]@0' at character 5: after '@' comes a whole number of at least 1"),
        ("[1]@", "after '@' comes a whole number"),
        ("1x0", "item '1x0' at character 1: after 'x' comes a whole number of at least 1"),
        ("1x-2", "after 'x' comes a whole number"),
        ("1/mean", "item '1/mean' at character 1: /mean, /fused and @k stand only after ']'"),
        ("(1,2)/mean", "stand only after ']'"),
        ("1@2", "stand only after ']'"),
        ("[1]@2/mean", "takes one of /mean, /fused and @k"),
        ("[1]/fused@2", "takes one of /mean, /fused and @k"),
        ("[1]/median", "after '/' comes mean or fused"),
        ("1*nan", "after '*' comes a finite number"),
        ("1*inf", "after '*' comes a finite number"),
        ("1*-inf", "after '*' comes a finite number"),
        ("1*1e999", "after '*' comes a finite number"),
        ("2,1*1e39,3", "item '1*1e39' at character 3: its scale is not a finite float32"),
        ("(1*1e30)*1e30", "its scale is not a finite float32"),
        ("5,30", "item '30' at character 3: layer 30 does not exist; ids of this model run from 0 to 29"),
        ("28-31", "item '28-31' at character 1: layer 31 does not exist"),
        ("9" * 5000, "does not exist"),
        ("-1", "expected a layer id from 0 to 29 instead of '-'"),
        ("3-", "expected a layer id from 0 to 29 instead of the end"),
        ("layer", "expected a layer id from 0 to 29 instead of 'l'"),
        ("1 2", "put ',' between items"),
        ("1(2)", "put ',' before it"),
        ("1+2", "'+' fuses layers only inside [ ]"),
        ("[1a+2]", "'+' joins single whole layers"),
        ("[1+2a]", "cannot follow a lane"),
        ("[1-2+3]", "'+' joins single whole layers"),
        ("[1x2]", "suffixes go after ']'"),
        ("1a-2", "a range holds whole layers"),
        ("1-2a", "only after a single layer id"),
        ("0-29*0.5x2", "item '0-29*0.5x2' at character 1: suffixes stand in the order form, xN, *s"),
        ("8x2x3", "suffixes stand in the order"),
        ("[1]x2@2", "suffixes stand in the order"),
        ("1²", "cannot follow an item"),
        ("١", "expected a layer id"),
        ("1x٣", "after 'x' comes a whole number"),
        ("1*٣", "after '*' comes a finite number"),
        ("((((0-29x99)x99)x99)x99)", "more than 4096 visits"),
        ("0x99999999999999999999", "more than 4096 visits"),
        ("0x" + "9" * 5000, "more than 4096 visits"),
        ("[0-29]@999999999", "more than 4096 visits"),
        ("(0-29)x136,0-29", "more than 4096 visits"),
        (",".join("1" * 5000), "more than 4096 visits"),
        ("(" * 5000, "groups nest more than 64 deep"),
        ("(1", "this '(' is not closed"),
        ("(1]", "this '(' is not closed"),
        ("[1", "this '[' is not closed"),
        ("[1,", "this '[' is not closed"),
        ("1)", "item ')' at character 2: ')' closes nothing"),
        ("1,\n2,\n 31", "item '31' at line 3, character 2: layer 31 does not exist"),
        (" " * 2_000_000, "more than the limit of 1000000"),
        (None, "a program is text"),
        (b"0-29", "a program is text"),
    ],
)
def test_wrong_text_says_what_where_and_why(text, says):
    with pytest.raises(ValueError) as error:
        Program.parse(text, 30)
    assert type(error.value) is ValueError
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_limits_are_inclusive():
    assert Program.parse("0x4096", 1).visits == 4096
    assert Program.parse("(" * 64 + "0" + ")" * 64, 1).visits == 1


@pytest.mark.parametrize("depth", [0, -1, 2.0, "30", None, True, 2**31])
def test_wrong_depth(depth):
    with pytest.raises(ValueError, match="depth of a model"):
        Program.parse("0", depth)


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_scales_print_shortest_and_round_trip(value):
    program = Program.parse(f"0*{value!r}", 1)
    again = Program.parse(str(program), 1)
    assert np.asarray(again.scale)[0, 0] == np.float32(value)
    assert len(str(program)) <= len(f"0*{np.float32(value)!s}")


def test_products_of_scales_round_once():
    program = Program.parse("((0*0.1)*0.1)*3", 1)
    assert np.asarray(program.scale)[0, 0] == np.float32(0.1 * 0.1 * 3)


def test_pad():
    program = Program.parse("0,[1,2]@2", 3)
    padded = program.pad(rows=5, lanes=4, slots=9)
    assert (padded.rows, padded.lanes, padded.slots, padded.visits) == (5, 4, 9, program.visits)
    assert padded == program and padded.pad(3, 2, 5).layer.shape == (3, 2)
    assert (np.asarray(padded.kind)[3:] == SUM).all() and (np.asarray(padded.scale)[3:] == 1).all()
    for wrong in ({"rows": 2}, {"lanes": 1}, {"slots": 4}):
        with pytest.raises(ValueError, match="needs at least"):
            program.pad(**wrong)
    with pytest.raises(ValueError, match="needs at least 2"):
        Program.parse("[0]@2", 1).pad(lanes=1)


def test_pytree():
    program = Program.parse("0-3,[1,2]@2", 4)
    leaves, treedef = jax.tree.flatten(program)
    assert [id(x) for x in leaves] == [
        id(getattr(program, name)) for name in ("layer", "part", "scale", "group", "slot", "kind")
    ]
    assert jax.tree.unflatten(treedef, leaves) == program
    assert "Program" in repr(jax.tree.unflatten(treedef, [object()] * 6))
    assert jax.device_get(jax.jit(lambda p: p)(program)) == program


def test_one_compilation_for_one_shape():
    count = jax.jit(lambda program: (program.layer >= 0).sum())
    a, b = Program.parse("0-3", 4).pad(6, 3, 9), Program.parse("[0-2]@2,3", 4).pad(6, 3, 9)
    assert (int(count(a)), int(count(b))) == (a.visits, b.visits)
    assert count._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def by_hand(**change) -> Program:
    program = Program.parse("0,[1+2,3],0m", 4)
    names = ("layer", "part", "scale", "group", "slot", "kind")
    tables = {name: np.array(getattr(program, name)) for name in names}
    for name, (at, value) in change.items():
        tables[name][at] = value
    return Program(**tables, depth=program.depth, slots=program.slots)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": ((1, 0), 0.5)}, "common finite scale"),
        ({"scale": ((0, 0), np.nan)}, "common finite scale"),
        ({"group": ((0, 0), 1)}, "groups are not numbered"),
        ({"slot": ((0, 0), 2)}, "slots do not count"),
        ({"part": ((1, 0), MLP), "slot": (1, [-1, 1, 2])}, "whole layers only"),
        ({"layer": ((0, 0), 7)}, "layer 7 in a model of 4"),
        ({"kind": (0, CONTINUE)}, "a continuation repeats"),
        ({"kind": (2, CONTINUE)}, "a continuation repeats"),
        ({"kind": (0, 9)}, "unknown kind 9"),
        ({"layer": (slice(None), -1)}, "needs 1 to 4096 visits"),
    ],
)
def test_tables_without_text(change, says):
    program = by_hand(**change)
    with pytest.raises(ValueError, match="has no text form") as error:
        str(program)
    assert says in str(error.value)
    assert repr(program).startswith("Program(<table") and program != by_hand()
    assert str(by_hand()) == "0,[1+2,3],0m"


def test_files(tmp_path):
    path = tmp_path / "p.txt"
    program = Program.parse("0-9,[10-13]@2,14-29", 30)
    program.write(path)
    assert path.read_text() == "0-9,[10-13]@2,14-29\n"
    assert Program.read(path, 30) == program and [p.name for p in tmp_path.iterdir()] == ["p.txt"]
    path.write_bytes(
        b"\xef\xbb\xbf# a comment, 99\r\n0-9,\r\n\r\n  # more\r\n [10-13]\r\n @2 # here\r\n,14-29\r\n"
    )
    assert Program.read(str(path), 30) == program
    for data, says in [
        (b"", "is empty"),
        (b"# only\n", "is empty"),
        (b"\xff\xfe0", "not UTF-8"),
        (b"# x\n0,\n99", "item '99' at line 3, character 1"),
        (b"#" * 1_000_001, "more than 1000000 bytes"),
    ]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(says)) as error:
            Program.read(path, 30)
        assert str(path) in str(error.value) and len(str(error.value).splitlines()) == 1
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(OSError, match=re.escape(str(wrong))):
            Program.read(wrong, 30)
    (tmp_path / "folder").mkdir()
    for wrong in (tmp_path / "absent" / "p.txt", tmp_path / "folder"):
        with pytest.raises(OSError, match=re.escape(str(wrong))):
            program.write(wrong)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "p.txt"]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (programs.identity(1), "0"),
        (programs.identity(30), "0-29"),
        (programs.skip(30, [10, 11]), "0-9,12-29"),
        (programs.skip(3, []), "0-2"),
        (programs.loop(30, 10, 14, 2), "0-14,10-29"),
        (programs.loop(3, 0, 2, 1), "0-2"),
        (programs.reverse(30, 5, 9), "0-4,9-5,10-29"),
        (programs.middle_repeat(30, 10, 14), "0-9,12x5,15-29"),
        (programs.parallel(30, 10, 13), "0-9,[10-13]/mean,14-29"),
        (programs.parallel(30, 10, 13, "sum"), "0-9,[10-13],14-29"),
        (programs.parallel(30, 10, 13, form="fused"), "0-9,[10-13]/fused,14-29"),
        (programs.newton(30, 10, 13, 2), "0-9,[10-13]@2,14-29"),
        (programs.looped_parallel(30, 10, 13, 3), "0-9,[10-13]/meanx3,14-29"),
        (programs.parallel(3, 1, 1), "0-2"),
    ],
)
def test_builders(program, text):
    assert str(program) == text


def test_shuffle_permutes_the_block():
    program = programs.shuffle(30, 10, 19, seed=3)
    layers = np.asarray(program.layer)[:, 0]
    assert program == programs.shuffle(30, 10, 19, seed=3) != programs.shuffle(30, 10, 19, seed=4)
    assert sorted(layers[10:20]) == list(range(10, 20)) and program.visits == 30
    assert [*layers[:10], *layers[20:]] == [*range(10), *range(20, 30)]


@pytest.mark.parametrize(
    "build",
    [
        lambda: programs.identity(0),
        lambda: programs.skip(4, [4]),
        lambda: programs.skip(4, range(4)),
        lambda: programs.loop(4, 2, 4, 2),
        lambda: programs.loop(4, 2, 1, 2),
        lambda: programs.loop(4, 1, 2, 0),
        lambda: programs.reverse(4, -1, 2),
        lambda: programs.shuffle(4, 3, 1, 0),
        lambda: programs.parallel(4, 1, 2, "median"),
        lambda: programs.newton(4, 1, 2, 0),
    ],
)
def test_builders_refuse(build):
    with pytest.raises(ValueError) as error:
        build()
    assert len(str(error.value).splitlines()) == 1


MERGE = """
slices:
- sources:
  - {model: org/m, layer_range: [0, 16]}
- sources:
  - model: org/m
    layer_range: [8, 24]
merge_method: passthrough
dtype: bfloat16
"""


def test_mergekit_both_ways():
    program = programs.from_mergekit(MERGE)
    assert program == Program.parse("0-15,8-23", 24)
    assert programs.from_mergekit(MERGE, depth=30) == Program.parse("0-15,8-23", 30)
    text = programs.to_mergekit(program, "org/m")
    assert yaml.safe_load(text)["slices"] == yaml.safe_load(MERGE)["slices"]
    for program in (programs.loop(30, 10, 14, 3), programs.reverse(30, 5, 9), Program.parse("8x3,29", 30)):
        assert programs.from_mergekit(programs.to_mergekit(program, "m"), 30) == program


@pytest.mark.parametrize("text", ["[0-3]", "[0-3]/mean", "0a", "0-3*0.5", "[0]@2", "[0+1]"])
def test_to_mergekit_refuses(text):
    with pytest.raises(ValueError, match="mergekit cannot stack"):
        programs.to_mergekit(Program.parse(text, 4), "m")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("passthrough", "slerp", "merge_method is 'slerp'"),
        ("dtype: bfloat16", "parameters: {t: 0.5}", "has parameters"),
        ("dtype: bfloat16", "models: [a]", "key 'models'"),
        ("  - model: org/m", "  - model: org/n", "mixes 2 models"),
        ("  - model: org/m", "  - parameters: {scale: 0.5}\n    model: org/m", "slice 2 has parameters"),
        (
            "- sources:\n  - model",
            "- parameters: {scale: 1}\n  sources:\n  - model",
            "slice 2 has parameters",
        ),
        (
            "  - {model: org/m, layer_range: [0, 16]}",
            "  - {model: org/m}",
            "layer_range of slice 1 needs two",
        ),
        ("[8, 24]", "[8, 8]", "breaks 0 <= start < end"),
        ("[8, 24]", "[-1, 8]", "breaks 0 <= start < end"),
        ("[8, 24]", "[8, 31]", "breaks 0 <= start < end <= 30"),
        ("[8, 24]", "[0.5, 8]", "two whole numbers"),
        ("[8, 24]", "[8, 24]\n  - {model: org/m, layer_range: [0, 1]}", "exactly one source"),
        ("slices:", "slices: [", "not valid YAML"),
        (MERGE, "[" * 5000, "not valid YAML"),
        (MERGE, "", "needs a list 'slices'"),
        (MERGE, "slices: []", "needs a list 'slices'"),
        (MERGE, "slices: [1]\nmerge_method: passthrough", "slice 1 needs exactly one source"),
    ],
)
def test_from_mergekit_refuses(old, new, says):
    assert old in MERGE
    with pytest.raises(ValueError, match="not a program") as error:
        programs.from_mergekit(MERGE.replace(old, new), 30)
    assert says in str(error.value) and len(str(error.value).splitlines()) == 1


def test_describe():
    text = Program.parse("0-9,[10-13]@2,14-20,8x3,[2+3,4]/meanx2*0.7,12a,[1,2]/fused", 30).describe()
    for line in ("rows 0-9 ", "Newton: 2 iterations over 4 lanes", "one layer, 3 times", "attention only"):
        assert line in text
    assert "26 rows, 4 lanes, 37 slots, 37 visits: 1.23 times the cost of the plain model" in text
    assert "never visited: 21-29" in text and "more than once: 1-4,8,10-13" in text
    assert "never visited: none" in programs.identity(3).describe()
    assert "never visited: 0-1,3,5-999999999" in Program.parse("2,4", 10**9).describe()


@settings(max_examples=15, deadline=None)
@given(program_texts(6))
def test_every_program_has_a_description_and_a_picture(text):
    program = Program.parse(text, 6)
    assert program.describe()
    assert program_figure(program).axes[0].get_xlabel().startswith("row")


def test_picture_is_drawn(tmp_path):
    program = Program.parse("0-4,[5-8]@3,[9,10a]/mean,(11-12)*0.7,13m,[14+15,16],[17-18]/fused", 20)
    path = tmp_path / "program.png"
    program_figure(program).savefig(path)
    assert path.stat().st_size > 10_000
