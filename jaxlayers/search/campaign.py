"""Searches for many tasks: trees advanced together, their programs scored in packed batches, journalled.

Tasks go in groups of one padded length. In each round every tree of a group proposes programs, and one forest
scores them all. After some rounds, an epoch, the scores are journalled and the forest is emptied: an epoch is
thus a function of the seed and the scores before it, down to the last bit, and a search that was killed goes
on from its journal to the same result.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlayers.decoder.stack import Decoder, fastest_form
from jaxlayers.execute.forest import Forest
from jaxlayers.files import replacing
from jaxlayers.program import WHOLE, Program
from jaxlayers.program_text import Item, parse_items
from jaxlayers.search.cola import Ids, Random, Settings, Tree
from jaxlayers.search.tasks import (
    FIELDS,
    Prepared,
    Reading,
    Task,
    continuations,
    details_of,
    is_right,
    prepare,
    read_answer,
)
from jaxlayers.weights.strict import parse_json, quoted
from jaxlayers.weights.tokenizer import Tokenizer

GROUP = 16  # tasks whose trees advance together
LEAVES = 8  # programs that a tree proposes in a round
EPOCH = 10  # rounds between journal entries
PACK = 16  # states in a call at most
LONGEST_LINE = 1 << 26  # bytes of a search in a file
LENGTHS = 16  # inputs are padded to multiples of this


class Condition(NamedTuple):
    """One way to search: what is compared in the table."""

    name: str
    settings: Settings
    random: bool = False  # random programs instead of a tree
    shuffled: bool = False  # against the answers of other tasks


def conditions(simulations: int) -> tuple[Condition, ...]:
    """Returns CoLa, its restrictions to skips and to loops, and its two controls."""
    both = Settings(simulations)
    return (
        Condition("cola", both),
        Condition("skip", dataclasses.replace(both, loops=False)),
        Condition("loop", dataclasses.replace(both, skips=False)),
        Condition("random", both, random=True),
        Condition("shuffled", both, shuffled=True),
    )


class Score(NamedTuple):
    """What one program does on one task."""

    ids: Ids
    right: bool
    logprob: float  # of the right answer, nats


class Found(NamedTuple):
    """All that a search tried for one task under one condition, in order; the first is the plain model."""

    task: Task
    condition: str
    scores: list[Score]

    @property
    def shortest(self) -> Score | None:
        """The shortest right program, the likeliest of equals; None where none is right."""
        right = [score for score in self.scores if score.right]
        return min(right, key=lambda score: (len(score.ids), -score.logprob), default=None)

    @property
    def pareto(self) -> list[Score]:
        """The programs that no shorter one equals in being right and in likelihood, shortest first."""
        best, front = (False, -np.inf), []
        for score in sorted(self.scores, key=lambda score: (len(score.ids), not score.right, -score.logprob)):
            if (score.right, score.logprob) > best:
                best = (score.right, score.logprob)
                front.append(score)
        return front

    def record(self, depth: int) -> dict[str, Any]:
        """Returns the search as a JSON-able record that `read_found` reads, programs as canonical text."""
        line = lambda score: {
            "program": str(program_of(score.ids, depth)),
            "length": len(score.ids),
            "right": score.right,
            "logprob": score.logprob if np.isfinite(score.logprob) else None,
        }
        return {
            **{name: getattr(self.task, name) for name in FIELDS},
            "condition": self.condition,
            "base": line(self.scores[0]),
            "shortest": line(self.shortest) if self.shortest else None,
            "pareto": [line(score) for score in self.pareto],
            "programs": [line(score) for score in self.scores],
        }


def program_of(ids: Ids, depth: int) -> Program:
    """Returns the program that runs whole layers in this order."""
    return Program.of([Item((((layer, WHOLE),),)) for layer in ids], depth)


def shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Returns the tasks with answers that are not theirs: what a search finds then is what chance finds.

    A free answer is that of another task of the same kind and level; a choice is another one of the task's.
    Raises ValueError where a task has no other answer to take.
    """
    found = []
    for task in tasks:
        draw = np.random.default_rng([seed, _number(task.id), 1])
        like = lambda other, task=task: (
            (other.kind, other.level, bool(other.choices))
            == (
                task.kind,
                task.level,
                False,
            )
        )
        pool = task.choices or sorted({other.answer for other in tasks if like(other)})
        others = [answer for answer in pool if answer != task.answer]
        if not others:
            raise ValueError(
                f"task {task.id} has the only answer of its kind and level, so that no other can be asked "
                "for; search on more tasks or without the shuffled control."
            )
        found.append(dataclasses.replace(task, answer=others[draw.integers(len(others))]))
    return found


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class Campaign:
    """The searches of some tasks under some conditions.

    Args:
      tasks: as `read_tasks` returns them.
      journal: where scores are kept while the search runs; None for nowhere.
      budget: bytes for the states of the forest.
      report: called with (programs scored, programs in all).

    Raises ValueError for a task that does not fit the model, and for a journal of another search.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        tasks: Sequence[Task],
        conditions: Sequence[Condition],
        seed: int = 0,
        journal: Path | None = None,
        budget: int = 1 << 30,
        report: Callable[[int, int], None] | None = None,
    ):
        self.decoder = fastest_form(decoder)
        self.depth = decoder.config.layers
        self.conditions = list(conditions)
        self.seed = seed
        self.budget = budget
        self.report = report or (lambda done, total: None)
        self.visits = 0  # executed
        self.lengths = 0  # of all programs scored, each on each input
        context = decoder.config.context
        self.work: list[tuple[Condition, list[Prepared]]] = []
        for condition in self.conditions:
            asked = shuffled(tasks, seed) if condition.shuffled else tasks
            prepared = [prepare(task, tokenizer, context) for task in asked]
            # Stable, so that groups are the same whenever the tasks are.
            prepared.sort(key=lambda each: _padded(max(map(len, each.rows))))
            self.work += [(condition, prepared[i : i + GROUP]) for i in range(0, len(prepared), GROUP)]
        self._order = {task.id: place for place, task in enumerate(tasks)}
        self._total = len(tasks) * sum(condition.settings.simulations for condition in self.conditions)
        self._done = 0
        self._width = max(len(ids) for _, group in self.work for each in group for ids in each.answers)
        mask = continuations(tokenizer, decoder.config.vocab)
        self._read = lambda decoder, h, details: read_answer(decoder, h, details, mask)
        self.journal = Journal(journal, self._fingerprint(tasks)) if journal else None

    def _fingerprint(self, tasks: Sequence[Task]) -> str:
        told = [dataclasses.asdict(task) | {"where": ""} for task in tasks]
        plan = [
            condition._replace(settings=dataclasses.astuple(condition.settings))
            for condition in self.conditions
        ]
        shape = [
            self.seed,
            GROUP,
            LEAVES,
            EPOCH,
            PACK,
            LENGTHS,
            self.budget,
            dataclasses.astuple(self.decoder.config),
        ]
        return hashlib.sha256(json.dumps([told, plan, shape], default=str).encode()).hexdigest()

    def run(self) -> Iterator[list[Found]]:
        """Yields what was found, group by group."""
        for number, (condition, group) in enumerate(self.work):
            yield self._group(number, condition, group)

    def ordered(self, found: Sequence[Found]) -> list[Found]:
        """Returns searches in the order of conditions, then of tasks."""
        names = [condition.name for condition in self.conditions]
        return sorted(found, key=lambda each: (names.index(each.condition), self._order[each.task.id]))

    def _group(self, number: int, condition: Condition, group: list[Prepared]) -> list[Found]:
        kind = Random if condition.random else Tree
        trees = [
            kind(self.depth, condition.settings, np.random.default_rng([self.seed, _number(each.task.id)]))
            for each in group
        ]
        scores: list[list[Score]] = [[] for _ in group]
        forest, epoch = None, 0
        while True:
            known = self.journal.scores(number, epoch) if self.journal else None
            if known is None:
                if forest is None:
                    length = _padded(max(len(row) for each in group for row in each.rows))
                    forest = Forest(self.decoder, length, self._read, self.budget, PACK)
                fresh = self._epoch(trees, group, forest)
                if self.journal:
                    self.journal.append(number, epoch, fresh)
            else:
                fresh = self._replay(trees, known)
            if not any(fresh):
                return [
                    Found(each.task, condition.name, list(found))
                    for each, found in zip(group, scores, strict=True)
                ]
            for found, new in zip(scores, fresh, strict=True):
                found += new
            epoch += 1

    def _replay(self, trees: Sequence[Tree | Random], known: list[list[Score]]) -> list[list[Score]]:
        given = [iter(scores) for scores in known]
        for _ in range(EPOCH):
            for tree, scores in zip(trees, given, strict=True):
                for ids in tree.propose(LEAVES):
                    score = next(scores, None)
                    if score is None or score.ids != ids:
                        raise ValueError(
                            f"{self.journal.path} is the journal of another search or version; "
                            "move it away to search from the start."
                        )
                    tree.reward(ids, float(score.right))
                    self._count(1)
        return known

    def _epoch(self, trees, group: list[Prepared], forest: Forest) -> list[list[Score]]:
        """Returns the scores of some rounds, by task; the forest starts empty."""
        forest.clear()
        inputs = [[forest.add(row) for row in each.rows] for each in group]
        details = [details_of(each, self._width) for each in group]
        scores: list[list[Score]] = [[] for _ in group]
        for _ in range(EPOCH):
            asked = [(place, ids) for place, tree in enumerate(trees) for ids in tree.propose(LEAVES)]
            if not asked:
                break
            jobs = [
                (number, program_of(ids, self.depth), detail)
                for place, ids in asked
                for number, detail in zip(inputs[place], details[place], strict=True)
            ]
            before = forest.visits
            readings: Iterator[Reading] = iter(forest.run(jobs))
            self.visits += forest.visits - before
            for place, ids in asked:
                rows = [next(readings) for _ in inputs[place]]
                right = is_right(group[place], rows)
                scores[place].append(Score(ids, right, float(rows[group[place].right].logprob)))
                trees[place].reward(ids, float(right))
                self.lengths += len(ids) * len(rows)
                self._count(1)
        return scores

    def _count(self, programs: int) -> None:
        self._done += programs
        self.report(self._done, self._total)


def _padded(length: int) -> int:
    return -(-length // LENGTHS) * LENGTHS


def write_found(found: Sequence[Found], path: Path, campaign: Campaign) -> None:
    """Writes a record for each search as JSON lines, whole or not at all, and removes the journal.

    Raises OSError in one sentence where it cannot be written; the journal then still holds the scores.
    """
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            for each in found:
                file.write(json.dumps(each.record(campaign.depth), sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise type(error)(
            f"cannot write {path}: {error.strerror}; the journal keeps what was found."
        ) from error
    if campaign.journal:
        campaign.journal.path.unlink(missing_ok=True)


def read_found(path: str | os.PathLike[str]) -> list[Found]:
    """Returns the searches in a file of `write_found`; log-likelihoods that are not finite become NaN.

    Each begins with the plain model, which tells the depth. Raises ValueError in one sentence with file and
    line for what is no search, one that stands twice, and models of two depths; OSError where the file cannot
    be read.
    """
    name, found, lines, depth = os.fspath(path), [], {}, 0
    try:
        with open(path, "rb") as file:
            # A limit, because a device file may never end a line.
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                where = f"{name}, line {number}"
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"{where} is longer than {LONGEST_LINE} bytes; is it a search?")
                each = _parse_found(line, where)
                key, layers = (each.task.id, each.condition), len(each.scores[0].ids)
                if lines.setdefault(key, number) != number:
                    raise ValueError(
                        f"{where}: the search {quoted(each.condition)} for the task {quoted(each.task.id)} "
                        f"stands in line {lines[key]} too."
                    )
                depth = depth or layers
                if layers != depth:
                    raise ValueError(f"{where} is of a model of {layers} layers, those before of {depth}.")
                found.append(each)
    except OSError as error:
        raise type(error)(f"cannot read the searches in {name}: {error.strerror}.") from error
    if not found:
        raise ValueError(f"{name} holds no search; `jaxlayers search --out FILE` writes such a file.")
    return found


def _parse_found(line: bytes, where: str) -> Found:
    record = parse_json(line, where)
    try:
        fields = {name: record[name] for name in FIELDS}
        task = Task(**fields | {"choices": tuple(fields["choices"])}, where=where)
        depth = record["base"]["length"]
        scores = [_parse_score(each, depth) for each in record["programs"]]
        if not scores or list(scores[0].ids) != list(range(len(scores[0].ids))):
            raise ValueError("the first of its programs is not the plain model")
        if len(scores[0].ids) != depth or not isinstance(record["condition"], str):
            raise TypeError
        return Found(task, record["condition"], scores)
    except KeyError as error:
        raise ValueError(f"{where}: the field {error.args[0]} is missing.") from None
    except TypeError:
        raise ValueError(f"{where} is no search: a field is not of the type that is written.") from None
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).rstrip('.')}.") from None


def _parse_score(line: dict[str, Any], depth: int) -> Score:
    items = parse_items(line["program"], depth)
    ids = tuple(item.lanes[0][0][0] for item in items)
    if any(item._replace(at=0) != Item((((layer, WHOLE),),)) for item, layer in zip(items, ids, strict=True)):
        raise ValueError(f"the program {quoted(line['program'])} is not whole layers in order")
    if type(line["right"]) is not bool:
        raise TypeError
    return Score(ids, line["right"], np.nan if line["logprob"] is None else float(line["logprob"]))


class Journal:
    """Scores by group and epoch, a checked line each; a line that a kill left half-written is dropped."""

    def __init__(self, path: Path, fingerprint: str):
        self.path = path
        self._known: dict[tuple[int, int], list[list[Score]]] = {}
        lines, good = [], 0
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            for line in data.splitlines(keepends=True):
                entry = _checked(line)
                if entry is None:
                    break
                good += len(line)
                lines.append(entry)
        if lines and lines[0] != fingerprint:
            raise ValueError(
                f"{path} is the journal of a search with other tasks, model or settings; "
                "move it away, or finish that search first."
            )
        for group, epoch, scores in lines[1:]:
            self._known[group, epoch] = [
                [Score(tuple(ids), right, np.nan if value is None else value) for ids, right, value in task]
                for task in scores
            ]
        if good and good < path.stat().st_size:
            os.truncate(path, good)
        if not lines:
            path.unlink(missing_ok=True)
            self._write(fingerprint)

    def scores(self, group: int, epoch: int) -> list[list[Score]] | None:
        """Returns the scores of an epoch by task, or None where it is not journalled."""
        return self._known.get((group, epoch))

    def append(self, group: int, epoch: int, scores: list[list[Score]]) -> None:
        """Adds an epoch; raises OSError in one sentence where it cannot be written."""
        plain = lambda value: value if np.isfinite(value) else None
        self._write(
            [group, epoch, [[[list(s.ids), s.right, plain(s.logprob)] for s in task] for task in scores]]
        )

    def _write(self, entry: Any) -> None:
        text = json.dumps(entry)
        try:
            with self.path.open("a") as file:
                file.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                f"cannot write the journal {self.path}: {error.strerror}; what it holds is kept, and the "
                "same command goes on from there."
            ) from error


def _checked(line: bytes) -> Any:
    """Returns the entry of a journal line, None where it is damaged."""
    check, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or check != f"{zlib.crc32(text[:-1]):08x}".encode():
        return None
    return json.loads(text)
