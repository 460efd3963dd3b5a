"""CoLa, chain of layers: search a layer program for one input by Monte Carlo tree search (arXiv 2507.07996).

A state is a sequence of layers, the root the plain model. An action skips the next k layers at some place, or
runs the k layers there r more times; k and r are 1 to 4. The tree descends by

    UCB(P) = Q / v + c sqrt(ln V / v) - lambda |P| / L

and takes a random child that is not yet explored with probability 0.1, or where there is no other. The paper
gives 200 simulations, lambda = 5 and the 0.1; c and the longest path it leaves open (here 1.8 and 2 L).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxlayers.program import WHOLE, Program
from jaxlayers.program_text import Item

Ids = tuple[int, ...]  # the layers of a program, in order


@dataclasses.dataclass(frozen=True)
class Settings:
    """The constants of the search."""

    simulations: int = 200
    skips: bool = True  # whether layers may be skipped
    loops: bool = True  # whether blocks may be repeated
    exploration: float = 1.8  # c
    length_penalty: float = 5.0  # lambda
    random_child: float = 0.1
    largest: int = 4  # k and r
    longest: float = 2.0  # of a program, in multiples of L

    def __post_init__(self):
        if self.simulations < 1:
            raise ValueError(f"simulations must be at least 1, not {self.simulations}.")
        if not (self.skips or self.loops):
            raise ValueError("a search needs skips or loops; allow at least one of them.")


def program_of(ids: Ids, depth: int) -> Program:
    """Returns the program that runs whole layers in this order."""
    return Program.of([Item((((layer, WHOLE),),)) for layer in ids], depth)


class Node:
    """A program in the tree. `visits` counts simulations below it, those still waiting for a score too."""

    __slots__ = ("children", "ids", "parent", "value", "visits")

    def __init__(self, ids: Ids, parent: "Node | None"):
        self.ids = ids
        self.parent = parent
        self.children: list[Node] = []
        self.value = 0.0  # Q, the sum of rewards
        self.visits = 0  # v


def edits(ids: Ids, settings: Settings, rng: np.random.Generator) -> Iterator[Ids]:
    """Yields random programs one action away, without end; some may be empty or too long."""
    while True:
        at, k, r = rng.integers(len(ids)), *rng.integers(1, settings.largest + 1, 2)
        skip = settings.skips and (not settings.loops or rng.random() < 0.5)
        yield ids[:at] + ids[at + k :] if skip else ids[: at + k] + ids[at : at + k] * int(r) + ids[at + k :]


class Tree:
    """The search for one input, advanced from outside: `propose` programs, then `reward` them."""

    def __init__(self, depth: int, settings: Settings, rng: np.random.Generator):
        self.depth = depth
        self.settings = settings
        self.rng = rng
        self.root = Node(tuple(range(depth)), None)
        self.seen: dict[Ids, Node] = {}
        self.started = 0  # simulations

    def propose(self, count: int) -> list[Ids]:
        """Returns up to `count` new programs to score.

        A proposal counts as a visit without reward until it is rewarded (virtual loss), which turns the next
        ones elsewhere. The first is the plain model. Fewer come back where the simulations are used up.
        """
        found = []
        while len(found) < count and self.started < self.settings.simulations:
            self.started += 1
            node = self.root if self.root.ids not in self.seen else self._expand()
            if node is None:
                continue
            self.seen[node.ids] = node
            found.append(node.ids)
            while node is not None:
                node.visits += 1
                node = node.parent
        return found

    def reward(self, ids: Ids, value: float) -> None:
        """Adds the reward of a proposed program to it and to all it came from."""
        node = self.seen[ids]
        while node is not None:
            node.value += value
            node = node.parent

    def _expand(self) -> Node | None:
        """Returns a new child; None where an action without an unseen result is drawn over and over."""
        node, settings = self.root, self.settings
        while node.children and self.rng.random() >= settings.random_child:
            node = max(node.children, key=lambda child: self._ucb(child, node.visits))
        most = int(settings.longest * self.depth)
        for _, ids in zip(range(100), edits(node.ids, settings, self.rng), strict=False):
            if 1 <= len(ids) <= most and ids not in self.seen:
                child = Node(ids, node)
                node.children.append(child)
                return child
        return None

    def _ucb(self, child: Node, total: int) -> float:
        explore = self.settings.exploration * math.sqrt(math.log(max(total, 1)) / child.visits)
        return (
            child.value / child.visits + explore - self.settings.length_penalty * len(child.ids) / self.depth
        )


class Random:
    """The control: as many distinct programs, each some random actions away from the plain model.

    The number of actions is drawn with the chance 1/2 for one, 1/4 for two and so on.
    """

    def __init__(self, depth: int, settings: Settings, rng: np.random.Generator):
        self.depth = depth
        self.settings = settings
        self.rng = rng
        self.seen: dict[Ids, None] = {}
        self.started = 0

    def propose(self, count: int) -> list[Ids]:
        """Returns up to `count` new programs to score; the first is the plain model."""
        found = []
        most = int(self.settings.longest * self.depth)
        while len(found) < count and self.started < self.settings.simulations:
            self.started += 1
            for _ in range(100):
                ids = tuple(range(self.depth))
                for _ in range(self.rng.geometric(0.5) if self.seen else 0):
                    ids = next(edits(ids, self.settings, self.rng)) or ids
                if ids not in self.seen and len(ids) <= most:
                    self.seen[ids] = None
                    found.append(ids)
                    break
        return found

    def reward(self, ids: Ids, value: float) -> None:
        """Does nothing: what was found does not steer what is tried."""


def search(
    depth: int,
    scorer: Callable[[Sequence[Program]], Sequence[float]],
    settings: Settings | None = None,
    seed: int = 0,
    leaves: int = 8,
) -> Iterator[tuple[Program, float]]:
    """Yields programs with their rewards as they are tried, the plain model first.

    `scorer` is any function from some programs to a reward for each, best between 0 and 1 (the exploration of
    `Settings` is made for that); it gets up to `leaves` programs at a time. Raises ValueError where it gives
    another number of rewards, or one that is not finite.
    """
    tree = Tree(depth, settings or Settings(), np.random.default_rng(seed))
    while asked := tree.propose(leaves):
        programs = [program_of(ids, depth) for ids in asked]
        rewards = [float(reward) for reward in scorer(programs)]
        if len(rewards) != len(programs):
            raise ValueError(f"the scorer gave {len(rewards)} rewards for {len(programs)} programs.")
        for ids, program, reward in zip(asked, programs, rewards, strict=True):
            if not math.isfinite(reward):
                raise ValueError(f"the scorer gave {reward} for program {program}; rewards must be finite.")
            tree.reward(ids, reward)
            yield program, reward
