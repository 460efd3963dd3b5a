"""Searches for many tasks: trees advanced together, their programs scored in packed batches, journalled.

Tasks go in groups of one padded length. In each round every tree of a group proposes programs, and one forest
scores them all. After some rounds, an epoch, the scores are journalled and the forest is emptied: an epoch is
thus a function of the seed and the scores before it, down to the last bit, and a search that was killed goes
on from its journal to the same result.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

import jaxlayers
from jaxlayers.decoder.stack import Decoder, fastest_form
from jaxlayers.execute.forest import Forest
from jaxlayers.search.answers import (
    Details,
    Prepared,
    continuations,
    details_of,
    is_right,
    prepare,
    read_answers,
    states_read,
)
from jaxlayers.search.cola import Random, Settings, Tree, program_of
from jaxlayers.search.found import Found, Score
from jaxlayers.search.journal import Journal
from jaxlayers.search.tasks import Task
from jaxlayers.weights.tokenizer import Tokenizer

GROUP = 32  # tasks whose trees advance together
LEAVES = 8  # programs that a tree proposes in a round
EPOCH = 10  # rounds between journal entries
PACK = 512  # tokens in a call at most
LENGTHS = 8  # inputs are padded to multiples of this


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


def shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Returns the tasks with answers that are not theirs: what a search finds then is what chance finds.

    A free answer is that of another task, of the same kind and level where there is one with another answer,
    else of the same kind, else of any; a choice is another one of the task's. Raises ValueError where a task
    has no other answer to take.
    """
    free = [task for task in tasks if not task.choices]
    found = []
    for task in tasks:
        draw = np.random.default_rng([seed, _number(task.id), 1])
        near = lambda other, task=task: (other.kind, other.level) == (task.kind, task.level)
        akin = lambda other, task=task: other.kind == task.kind
        pools = (
            [task.choices]
            if task.choices
            else [
                sorted({other.answer for other in free if like(other)})
                for like in (near, akin, lambda other: True)
            ]
        )
        others = next(filter(None, ([a for a in pool if a != task.answer] for pool in pools)), [])
        if not others:
            raise ValueError(
                f"task {task.id} has the only answer there is, so that no other can be asked for; "
                "search on more tasks or without the shuffled control."
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
      per_token: compare choices by their log-likelihood per token.
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
        per_token: bool = False,
        budget: int = 1 << 31,
        report: Callable[[int, int], None] | None = None,
    ):
        self.decoder = fastest_form(decoder)
        self.depth = decoder.config.layers
        self.conditions = list(conditions)
        self.seed = seed
        self.per_token = per_token
        self.budget = budget
        self.report = report or (lambda done, total: None)
        self.visits = 0  # executed
        self.lengths = 0  # visits of all programs scored, had each run alone
        context = decoder.config.context
        self.work: list[tuple[Condition, list[Prepared]]] = []
        for condition in self.conditions:
            asked = shuffled(tasks, seed) if condition.shuffled else tasks
            prepared = [prepare(task, tokenizer, context) for task in asked]
            # Stable, so that groups are the same whenever the tasks are.
            prepared.sort(key=lambda each: (_padded(len(each.tokens)), states_read(each)))
            self.work += [(condition, prepared[i : i + GROUP]) for i in range(0, len(prepared), GROUP)]
        self._order = {task.id: place for place, task in enumerate(tasks)}
        self._total = len(tasks) * sum(condition.settings.simulations for condition in self.conditions)
        self._done = 0
        self._at_work: tuple = ("", [], [], [])  # condition, tasks, their scores, and those of the epoch
        mask = continuations(tokenizer, decoder.config.vocab)
        self._read = lambda decoder, h, details: read_answers(decoder, h, details, mask)
        self.journal = Journal(journal, self._fingerprint(tasks)) if journal else None

    def _fingerprint(self, tasks: Sequence[Task]) -> str:
        told = [dataclasses.asdict(task) | {"where": ""} for task in tasks]
        plan = [
            condition._replace(settings=dataclasses.astuple(condition.settings))
            for condition in self.conditions
        ]
        shape = [
            self.seed,
            self.per_token,
            GROUP,
            LEAVES,
            EPOCH,
            PACK,
            LENGTHS,
            self.budget,
            dataclasses.astuple(self.decoder.config),
            [int(_weight_sum(a)) for a in jax.tree.leaves((self.decoder.embedding, self.decoder.layers))],
            # What may change the last bits of a number.
            jaxlayers.__version__,
            jax.__version__,
            jax.default_backend(),
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

    def so_far(self) -> list[Found]:
        """Returns what was found in the group at work, for a search that is interrupted."""
        name, group, scores, fresh = self._at_work
        found = [Found(e.task, name, old + new) for e, old, new in zip(group, scores, fresh, strict=True)]
        return [each for each in found if each.scores]

    def _group(self, number: int, condition: Condition, group: list[Prepared]) -> list[Found]:
        kind = Random if condition.random else Tree
        trees = [
            kind(self.depth, condition.settings, np.random.default_rng([self.seed, _number(each.task.id)]))
            for each in group
        ]
        scores: list[list[Score]] = [[] for _ in group]
        forest, epoch = None, 0
        while True:
            fresh: list[list[Score]] = [[] for _ in group]
            self._at_work = condition.name, group, scores, fresh
            known = self.journal.scores(number, epoch) if self.journal else None
            if known is None:
                if forest is None:
                    length = _padded(max(len(each.tokens) for each in group))
                    forest = Forest(
                        self.decoder, length, self._read, self._room(condition, len(group) * length), PACK
                    )
                self._epoch(trees, group, forest, fresh)
                if self.journal:
                    self.journal.append(number, epoch, fresh)
            else:
                self._replay(trees, known)
                fresh = known
            if not any(fresh):
                found = self.so_far()
                self._at_work = "", [], [], []
                return found
            scores = [old + new for old, new in zip(scores, fresh, strict=True)]
            epoch += 1

    def _room(self, condition: Condition, tokens: int) -> int:
        """Returns the bytes for states: no more than an epoch fills, given a state of each task's tokens."""
        steps = LEAVES * EPOCH * int(condition.settings.longest * self.depth + 1)
        return min(self.budget, steps * tokens * self.decoder.config.embed * 8)

    def _replay(self, trees: Sequence[Tree | Random], known: list[list[Score]]) -> None:
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

    def _epoch(self, trees, group: list[Prepared], forest: Forest, scores: list[list[Score]]) -> None:
        """Adds the scores of some rounds to those of each task; the forest starts empty."""
        forest.clear()
        inputs = [forest.add(each.tokens, each.positions, each.branch) for each in group]
        details: dict[int, Details] = {}
        for choices in (False, True):  # apart, because choices read more
            places = [place for place, each in enumerate(group) if bool(each.task.choices) == choices]
            details |= zip(places, details_of([group[place] for place in places]), strict=True)
        for _ in range(EPOCH):
            asked = [(place, ids) for place, tree in enumerate(trees) for ids in tree.propose(LEAVES)]
            if not asked:
                break
            jobs = [(inputs[place], program_of(ids, self.depth), details[place]) for place, ids in asked]
            before = forest.visits
            readings = forest.run(jobs)
            self.visits += forest.visits - before
            for (place, ids), reading in zip(asked, readings, strict=True):
                right = is_right(group[place], reading, self.per_token)
                scores[place].append(Score(ids, right, float(reading.logprob[group[place].right])))
                trees[place].reward(ids, float(right))
                self.lengths += len(ids)
                self._count(1)

    def _count(self, programs: int) -> None:
        self._done += programs
        self.report(self._done, self._total)


def _padded(length: int) -> int:
    return -(-length // LENGTHS) * LENGTHS


@jax.jit
def _weight_sum(a: Array) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(a, jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32).ravel()
    place = jnp.arange(bits.size, dtype=jnp.uint32)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)
