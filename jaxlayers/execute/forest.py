"""Many programs for one or several inputs: a shared prefix runs once, and equal steps run together.

The programs of an input form a trie whose edges are steps (a row, or a Newton row with its continuations). A
node's state is the residual stream after its steps. Pending edges with the same step, of whatever input, are
packed into one call. States live in one pool of fixed size; the least recently used go first, and what is
needed again is computed again from the nearest state that is left.
"""

import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlayers.decoder.stack import Decoder, embed
from jaxlayers.execute.rows import run
from jaxlayers.execute.step import bucket, isolate
from jaxlayers.program import Program
from jaxlayers.program_text import Item

Read = Callable[[Decoder, Float[Array, "N T D"], Any], Any]


class Node:
    """A prefix of programs of one input."""

    __slots__ = ("children", "input", "parent", "place", "step")

    def __init__(self, input: int, parent: "Node | None", step: Item | None):
        self.input = input
        self.parent = parent
        self.step = step  # from the parent to here; None at the root
        self.children: dict[Item, Node] = {}
        self.place: int | None = None  # of its state in the pool


class Forest:
    """Runs programs over inputs of one padded length.

    Args:
      decoder: the model; on CPU the `per_layer` form is the faster.
      length: tokens an input holds at most, T; shorter ones are padded behind.
      read: makes results of final states: (decoder, states [N, T, D], details with a leading axis N) -> a
        tree of arrays with a leading axis N. It is compiled once for each function.
      budget: bytes for states; at least one state is kept.
      pack: states worked on together at most, a power of two.

    `visits` counts the visits executed, repeated ones after an eviction included.
    """

    def __init__(self, decoder: Decoder, length: int, read: Read, budget: int = 1 << 30, pack: int = 16):
        if length < 1 or pack < 1 or pack & (pack - 1):
            raise ValueError(f"length {length} must be at least 1 and pack {pack} a power of two.")
        self.decoder = decoder
        self.length = length
        self.pack = pack
        self.visits = 0
        width = decoder.config.embed
        dtype = jnp.promote_types(jax.tree.leaves(decoder.embedding)[0].dtype, jnp.float32)
        self.places = max(1, budget // (length * width * dtype.itemsize))
        self._pool = jnp.zeros((self.places, length, width), dtype)
        self._free = list(range(self.places))
        self._resident: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._inputs = np.zeros((0, 3, length), np.int32)  # tokens, positions, branches
        self._roots: list[Node] = []
        self._read = read
        self._isolated = functools.cache(lambda step: isolate(decoder, step))

    def add(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        branch: Sequence[int] | None = None,
    ) -> int:
        """Returns the number of a new input; raises ValueError where it does not fit or names no token.

        Positions count from 0 by default. With `branch` several continuations of one text are one input: a
        token of branch 0 is seen by all later positions, any other by its own branch alone.
        """
        n = len(tokens)
        if not 0 < n <= self.length:
            raise ValueError(f"an input of {n} tokens does not fit 1..{self.length}.")
        vocab = self.decoder.config.vocab
        if not all(0 <= token < vocab for token in tokens):
            raise ValueError(f"the input holds an id outside the vocabulary 0..{vocab - 1}.")
        parts = (tokens, 0), (range(n) if positions is None else positions, -1), (branch or [0] * n, 0)
        if any(len(part) != n for part, _ in parts):
            raise ValueError(f"positions and branch must be given for each of the {n} tokens.")
        padded = [
            np.pad(np.asarray(part, np.int32), (0, self.length - n), constant_values=fill)
            for part, fill in parts
        ]
        self._inputs = np.concatenate([self._inputs, np.stack(padded)[None]])
        self._roots.append(Node(len(self._roots), None, None))
        return len(self._roots) - 1

    def clear(self) -> None:
        """Forgets all inputs and states, as in a new forest; what was compiled stays."""
        self._free = list(range(self.places))
        self._resident.clear()
        self._inputs = self._inputs[:0]
        self._roots.clear()

    def run(self, jobs: Sequence[tuple[int, Program, Any]]) -> list[Any]:
        """Returns read's result for each job (input, program, details): numpy arrays without the axis N."""
        readers: dict[Node, list[int]] = defaultdict(list)
        for number, (input, program, _) in enumerate(jobs):
            node = self._roots[input]
            for step in program.items:
                if step not in node.children:
                    node.children[step] = Node(input, node, step)
                node = node.children[step]
            readers[node].append(number)
        results: list[Any] = [None] * len(jobs)
        wanted: dict[Node, None] = dict.fromkeys(readers)  # in order of the jobs; their states are to be read
        front = Frontier(wanted)
        while wanted:
            pressed = self.places - len(front.waiting) < self.pack
            if front.stale or pressed:
                front = Frontier(wanted)
            ready = [node for node in wanted if node.place is not None][: self.pack]
            # Reading waits for a full call too, as long as there is room.
            if len(ready) == self.pack or (ready and (pressed or not front.edges)):
                self._read_some(jobs, ready, readers, results)
                for node in ready:
                    del wanted[node]
                    front.read(node)
            else:
                self._compute(*front.choose(self.pack, pressed), front)
        return results

    def _compute(self, step: Item | None, nodes: list[Node], front: "Frontier") -> None:
        places, kept = [], []
        busy = {node.parent for node in nodes if node.parent is not None}
        for node in nodes:
            place = self._place(busy, front)
            if place is None:
                break
            places.append(place)
            kept.append(node)
        if not kept:  # the pool holds nothing but this parent: its state gives way to the child's
            node = nodes[0]
            parent = node.parent
            places, kept = [parent.place], [node]
            del self._resident[parent]
            sources = [parent.place]
            parent.place = None
            front.stale = True
        else:
            sources = [0 if node.parent is None else node.parent.place for node in kept]
        size = bucket(len(kept), self.pack)
        pad = lambda values, fill: np.asarray([*values, *[fill] * (size - len(values))], np.int32)
        tokens, positions, branch = self._inputs[pad([node.input for node in kept], 0)].swapaxes(0, 1)
        target = pad(places, self.places)  # beyond the pool: dropped
        if step is None:
            self._pool = _embed(self.decoder, self._pool, tokens, target)
        else:
            part, program = self._isolated(step)
            self._pool = _advance(part, self._pool, positions, branch, program, pad(sources, 0), target)
            self.visits += program.visits * len(kept)
        for node, place in zip(kept, places, strict=True):
            node.place = place
            self._resident[node] = None
            if node.parent is not None and node.parent.place is not None:
                self._resident.move_to_end(node.parent)
            front.done(node)

    def _read_some(self, jobs, nodes, readers, results) -> None:
        pairs = [(node, number) for node in nodes for number in readers[node]]
        for start in range(0, len(pairs), self.pack):
            part = pairs[start : start + self.pack]
            size = bucket(len(part), self.pack)
            part = part + [part[-1]] * (size - len(part))
            rows = np.asarray([node.place for node, _ in part], np.int32)
            details = jax.tree.map(lambda *a: np.stack(a), *[jobs[number][2] for _, number in part])
            found = jax.tree.map(np.asarray, _final(self._read, self.decoder, self._pool, rows, details))
            for i, (_, number) in enumerate(part):
                results[number] = jax.tree.map(lambda a, i=i: a[i], found)
        for node in nodes:
            self._resident.move_to_end(node)

    def _place(self, busy: set[Node], front: "Frontier") -> int | None:
        """Returns a free place; the least recently used state is evicted, those still waited for last."""
        if self._free:
            return self._free.pop()
        idle = next((node for node in self._resident if node not in busy and node not in front.waiting), None)
        if idle is None:
            idle = next((node for node in self._resident if node not in busy), None)
            front.stale = True
        if idle is None:
            return None
        del self._resident[idle]
        place, idle.place = idle.place, None
        return place


class Frontier:
    """What can be computed next towards the wanted states: nodes whose parents' states are there.

    `stale` where a state is gone that was waited for: then the frontier must be made again.
    """

    def __init__(self, wanted: Iterable[Node]):
        self.edges: dict[Item | None, dict[Node, None]] = {}  # by the step that leads to them
        self.waiting: Counter[Node] = Counter()  # states to be kept: for how many edges, and for being read
        self.stale = False
        self._wanted = set(wanted)
        self._needed: set[Node] = set()
        for node in wanted:
            if node.place is not None:
                self.waiting[node] += 1
            while node.place is None and node not in self._needed:
                self._needed.add(node)
                if node.parent is None or node.parent.place is not None:
                    self._add(node)
                    break
                node = node.parent

    def choose(self, most: int, pressed: bool) -> tuple[Item | None, list[Node]]:
        """Returns a step and the nodes to reach by it in one call.

        It is a step of the lowest layer that any node waits for: the others gain company by waiting, because
        most programs climb. Where places run out it is the first job's, so that one always moves.
        """
        rank = lambda step: (_lowest(step), -len(self.edges[step]))
        step = next(iter(self.edges)) if pressed else min(self.edges, key=rank)
        return step, list(self.edges[step])[:most]

    def done(self, node: Node) -> None:
        """Takes a computed node out; the needed ones after it come in."""
        del self.edges[node.step][node]
        if not self.edges[node.step]:
            del self.edges[node.step]
        if node.parent is not None:
            self.read(node.parent)
        if node in self._wanted:
            self.waiting[node] += 1
        for child in node.children.values():
            if child in self._needed:
                self._add(child)

    def read(self, node: Node) -> None:
        """Counts one use of a state less."""
        self.waiting[node] -= 1
        if not self.waiting[node]:
            del self.waiting[node]

    def _add(self, node: Node) -> None:
        self.edges.setdefault(node.step, {})[node] = None
        if node.parent is not None:
            self.waiting[node.parent] += 1


def _lowest(step: Item | None) -> int:
    return -1 if step is None else min(layer for lane in step.lanes for layer, _ in lane)


@functools.partial(jax.jit, static_argnums=0)
def _final(read, decoder, pool, rows, details):
    return read(decoder, pool[rows], details)


@functools.partial(jax.jit, donate_argnames="pool")
def _embed(decoder, pool, tokens, target):
    return pool.at[target].set(embed(decoder, tokens), mode="drop")


@functools.partial(jax.jit, donate_argnames="pool")
def _advance(
    decoder: Decoder,
    pool: Float[Array, "P T D"],
    positions: Int[Array, "N T"],
    branch: Int[Array, "N T"],
    program: Program,
    source: Int[Array, " N"],
    target: Int[Array, " N"],
) -> Float[Array, "P T D"]:
    h = run(decoder, pool[source], program, positions, branch=branch).h
    return pool.at[target].set(h, mode="drop")
