"""Searches of many tasks: equal to each program alone, and the same after any interruption."""

import json
import re

import checkpoints
import numpy as np
import pytest

from jaxlayers.execute.rows import forward
from jaxlayers.program import Program
from jaxlayers.search import campaign as module
from jaxlayers.search.campaign import Campaign, conditions, shuffled
from jaxlayers.search.found import Found, Score, read_found, write_found
from jaxlayers.search.report import sentences, summary
from jaxlayers.search.tasks import Task

MODEL = checkpoints.model(5)
TASKS = [
    Task("a", "the and", "in"),
    Task("b", "in the", " the", kind="x", level=1),
    Task("c", "and", "an", (" the", "an", "q"), kind="x"),
    Task("d", "th", "e", kind="x", level=1),
    Task("e", "e e", "f"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"GROUP": 2, "LEAVES": 3, "EPOCH": 2, "PACK": 4}.items():
        monkeypatch.setattr(module, name, value)


def campaign(path=None, plan=None, **more):
    plan = plan or conditions(12)[:1]
    return Campaign(MODEL.decoder, MODEL.tokenizer, TASKS, plan, journal=path, **more)


def searched(path=None, **more):
    made = campaign(path, **more)
    return made.ordered([found for group in made.run() for found in group]), made


def test_scores_are_those_of_each_program_alone():
    found, _ = searched()
    assert [each.task.id for each in found] == list("abcde")
    for each in found[:3]:
        answer = MODEL.tokenizer.encode(each.task.answer, special=False)
        prompt = MODEL.tokenizer.encode(each.task.prompt)
        for score in each.scores[:4]:
            program = Program.parse(",".join(map(str, score.ids)), 4)
            logits = np.asarray(forward(MODEL.decoder, np.asarray([[*prompt, *answer]]), program))[0]
            logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            want = sum(logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(answer))
            assert score.logprob == pytest.approx(want, abs=1e-2, rel=1e-3)


def test_what_is_reported_follows_from_the_scores():
    (each, *_), _ = searched()
    right = [score for score in each.scores if score.right]
    if each.shortest:
        assert len(each.shortest.ids) == min(len(score.ids) for score in right)
    lengths = [len(score.ids) for score in each.pareto]
    assert lengths == sorted(set(lengths))
    record = each.record(4)
    assert record["base"]["program"] == "0-3" and len(record["programs"]) == len(each.scores)


def in_file(path):
    """Writes two searches of a model with four layers and returns them."""
    choice = Task("b", "$ 'ä\n", " y", (" y", "z"), "kind", 2, "test")
    scores = [
        Score((0, 1, 2, 3), False, -1 / 3),
        Score((0, 0, 0, 3, 2, 1), True, -1e-300),
        Score((3,), False, -0.0),
    ]
    found = [Found(TASKS[0], "cola", scores), Found(choice, "of my own", scores[:1])]
    write_found(found, path, 4)
    return found


def test_a_file_reads_back_as_what_was_found(tmp_path):
    found = in_file(tmp_path / "found")
    again = read_found(tmp_path / "found")
    assert again == found
    assert summary(again) == summary(found)


@pytest.mark.parametrize(
    "change, needle",
    [
        (lambda record: record.pop("prompt"), "the field prompt is missing"),
        (lambda record: record.update(answer=""), "answer is empty"),
        (lambda record: record.update(choices=3), "not of the type"),
        (lambda record: record.update(base=None), "not of the type"),
        (lambda record: record.update(condition=3), "not of the type"),
        (lambda record: record.update(programs=[]), "not the plain model"),
        (lambda record: record["programs"].pop(0), "not the plain model"),
        (lambda record: record["programs"][1].update(program="0-9"), "layer 9 does not exist"),
        (lambda record: record["programs"][1].update(program="[0-1]"), "not whole layers in order"),
        (lambda record: record["programs"][1].update(program="0a"), "not whole layers in order"),
        (lambda record: record["programs"][1].update(right=1), "not of the type"),
        (lambda record: record["programs"][1].pop("logprob"), "the field logprob is missing"),
        (lambda record: record.update(base={"length": 3}, programs=record["programs"][:1]), "layer 3 does"),
        (lambda record: record.update(base={"length": 5}), "not of the type"),
        (lambda record: record.update(id="b", condition="of my own"), "stands in line 1 too"),
        (lambda record: record.clear(), "the field id is missing"),
    ],
)
def test_a_damaged_file_is_told_with_its_line(tmp_path, change, needle):
    path = tmp_path / "found"
    in_file(path)
    first, second = path.read_text().splitlines()
    record = json.loads(first) | {"id": "z"}
    change(record)
    path.write_text("\n".join([second, json.dumps(record), first]))
    with pytest.raises(ValueError, match=re.escape(needle)) as told:
        read_found(path)
    assert f"{path}, line 2" in str(told.value) and str(told.value).endswith(".")


def test_a_file_that_is_none_is_told(tmp_path):
    path = tmp_path / "found"
    path.write_text("")
    with pytest.raises(ValueError, match="holds no search"):
        read_found(path)
    path.write_text("[")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        read_found(path)
    with pytest.raises(OSError, match="cannot read the searches"):
        read_found(tmp_path)


def test_an_interrupted_search_goes_on_to_the_same_file(tmp_path):
    whole, made = searched()
    write_found(whole, tmp_path / "whole", 4)
    journal = tmp_path / "journal"
    for stop in range(1, 6):
        scored = 0

        def report(done, total, stop=stop):
            nonlocal scored
            scored += 1
            if scored == 7 * stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            searched(journal, report=report)
    again, made = searched(journal)
    write_found(again, tmp_path / "again", 4)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
    made.journal.remove()
    assert not journal.exists()


def test_what_is_journalled_is_not_scored_again(tmp_path):
    journal = tmp_path / "journal"
    _, first = searched(journal)
    assert first.visits > 0
    _, second = searched(journal)
    assert second.visits == 0


def test_a_torn_line_is_dropped_and_another_journal_refused(tmp_path):
    journal = tmp_path / "journal"
    whole, _ = searched(journal)
    data = journal.read_bytes()
    journal.write_bytes(data[: len(data) // 2])
    again, made = searched(journal)
    assert again == whole and made.visits > 0
    with pytest.raises(ValueError, match="other tasks, model or settings"):
        campaign(journal, seed=1)


def test_the_table_has_every_condition_and_its_controls(tmp_path):
    found, _ = searched(plan=conditions(6))
    result = summary(found)
    assert list(result["conditions"]) == ["cola", "skip", "loop", "random", "shuffled"]
    assert result["conditions"]["cola"]["all"]["tasks"] == len(TASKS)
    assert len(sentences(result)) == 10
    json.dumps([each.record(4) for each in found], allow_nan=False)


def test_shuffled_tasks_ask_for_what_is_wrong():
    for task, other in zip(TASKS[1:4], shuffled(TASKS[1:4], 0), strict=True):
        assert other.answer != task.answer and other.prompt == task.prompt
    with pytest.raises(ValueError, match="only answer"):
        shuffled(TASKS[:1], 0)


def test_a_likelihood_that_is_no_number_is_the_least():
    scores = [Score((0, 1), False, value) for value in (-1.0, np.nan, -0.5, np.nan, -0.1)]
    found = Found(TASKS[0], "cola", scores)
    assert [score.logprob for score in found.pareto] == [-0.1]
    right = Found(TASKS[0], "cola", [Score((0,), True, np.nan), Score((1,), True, -3.0)])
    assert right.shortest.ids == (1,)
