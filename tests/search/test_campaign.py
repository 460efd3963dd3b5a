"""Searches of many tasks: equal to each program alone, and the same after any interruption."""

import json

import checkpoints
import numpy as np
import pytest

from jaxlayers.execute.rows import forward
from jaxlayers.program import Program
from jaxlayers.search import campaign as module
from jaxlayers.search.campaign import Campaign, conditions, shuffled
from jaxlayers.search.found import write_found
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
    assert len(sentences(result)) == 9
    json.dumps([each.record(4) for each in found], allow_nan=False)


def test_shuffled_tasks_ask_for_what_is_wrong():
    for task, other in zip(TASKS[1:4], shuffled(TASKS[1:4], 0), strict=True):
        assert other.answer != task.answer and other.prompt == task.prompt
    with pytest.raises(ValueError, match="only answer"):
        shuffled(TASKS[:1], 0)
