"""Many programs for one or several inputs: a shared prefix runs once, and equal steps run together.

The programs of an input form a trie whose edges are steps (a row, or a Newton row with its continuations). A
node's state is the residual stream after its steps. Pending edges with the same step, of whatever input, are
packed into one call. States live in one pool of fixed size; the least recently used go first, and what is
needed again is computed again from the nearest state that is left.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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

    __slots__ = ("children", "input", "parent", "place", "step", "used")

    def __init__(self, input: int, parent: "Node | None", step: Item | None):
        self.input = input
        self.parent = parent
        self.step = step  # from the parent to here; None at the root
        self.children: dict[Item, Node] = {}
        self.place: int | None = None  # of its state in the pool
        self.used = 0  # when its state was last touched


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
        self._resident: dict[int, Node] = {}  # by place
        self._tokens: list[np.ndarray] = []
        self._roots: list[Node] = []
        self._clock = 0
        self._read = read

    def add(self, tokens: Sequence[int]) -> int:
        """Returns the number of a new input; raises ValueError where it does not fit or names no token."""
        if not 0 < len(tokens) <= self.length:
            raise ValueError(f"an input of {len(tokens)} tokens does not fit 1..{self.length}.")
        vocab = self.decoder.config.vocab
        if not all(0 <= token < vocab for token in tokens):
            raise ValueError(f"the input holds an id outside the vocabulary 0..{vocab - 1}.")
        padded = np.full(self.length, -1, np.int32)
        padded[: len(tokens)] = tokens
        self._tokens.append(padded)
        self._roots.append(Node(len(self._roots), None, None))
        return len(self._roots) - 1

    def clear(self) -> None:
        """Forgets all inputs and states, as in a new forest; what was compiled stays."""
        self._free = list(range(self.places))
        self._resident.clear()
        self._tokens.clear()
        self._roots.clear()
        self._clock = 0

    def run(self, jobs: Sequence[tuple[int, Program, Any]]) -> list[Any]:
        """Returns read's result for each job (input, program, details): numpy arrays without the axis N."""
        ends: list[Node] = []
        readers: dict[Node, list[int]] = defaultdict(list)
        for number, (input, program, _) in enumerate(jobs):
            node = self._roots[input]
            for step in program.items:
                if step not in node.children:
                    node.children[step] = Node(input, node, step)
                node = node.children[step]
            ends.append(node)
            readers[node].append(number)
        results: list[Any] = [None] * len(jobs)
        wanted: dict[Node, None] = dict.fromkeys(readers)  # in order of the jobs; their states are to be read
        while wanted:
            self._round(jobs, wanted, readers, results)
        return results

    def _round(self, jobs, wanted, readers, results) -> None:
        """Makes one packed call.

        It runs a step of the lowest layer that any node waits for: the others gain company by waiting,
        because most programs climb. Where places run out it is the first job's, so that one always moves.
        """
        ready = [node for node in wanted if node.place is not None]
        if ready:
            return self._read_some(jobs, ready[: self.pack], wanted, readers, results)
        edges: dict[Node, None] = {}  # nodes to compute next, whose parents' states are there
        waiting: Counter[Node] = Counter()
        for end in wanted:
            node = end
            while node.parent is not None and node.parent.place is None:
                node = node.parent
            if node not in edges:
                edges[node] = None
                if node.parent is not None:
                    waiting[node.parent] += 1
        groups: dict[Item | None, list[Node]] = defaultdict(list)
        for node in edges:
            groups[node.step].append(node)
        first = next(iter(edges))
        pressed = self.places - len(waiting) < self.pack
        step = first.step if pressed else min(groups, key=lambda step: (_lowest(step), -len(groups[step])))
        nodes = groups[step][: self.pack]
        self._compute(step, nodes, waiting)

    def _compute(self, step: Item | None, nodes: list[Node], waiting: Counter) -> None:
        places, kept = [], []
        busy = {node.parent for node in nodes if node.parent is not None}
        for node in nodes:
            place = self._place(busy, waiting)
            if place is None:
                break
            places.append(place)
            kept.append(node)
        if not kept:  # the pool holds nothing but this parent: its state gives way to the child's
            node = nodes[0]
            parent = node.parent
            places, kept = [parent.place], [node]
            del self._resident[parent.place]
            sources = [parent.place]
            parent.place = None
        else:
            sources = [0 if node.parent is None else node.parent.place for node in kept]
        size = bucket(len(kept), self.pack)
        pad = lambda values, fill: np.asarray([*values, *[fill] * (size - len(values))], np.int32)
        tokens = np.stack([self._tokens[node.input] for node in kept])
        tokens = np.pad(tokens, [(0, size - len(kept)), (0, 0)], constant_values=-1)
        target = pad(places, self.places)  # beyond the pool: dropped
        if step is None:
            self._pool = _embed(self.decoder, self._pool, tokens, target)
        else:
            part, program = isolate(self.decoder, step)
            self._pool = _advance(part, self._pool, tokens, program, pad(sources, 0), target)
            self.visits += program.visits * len(kept)
        for node, place in zip(kept, places, strict=True):
            node.place = place
            self._resident[place] = node
            self._touch(node)
            if node.parent is not None:
                self._touch(node.parent)

    def _read_some(self, jobs, nodes, wanted, readers, results) -> None:
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
            self._touch(node)
            del wanted[node]

    def _place(self, busy: set[Node], waiting: Counter) -> int | None:
        """Returns a free place; the least recently used state is evicted, those still waited for last."""
        if self._free:
            return self._free.pop()
        idle = [node for node in self._resident.values() if node not in busy]
        if not idle:
            return None
        node = min(idle, key=lambda node: (waiting[node] > 0, node.used))
        self._release(node)
        return self._free.pop()

    def _release(self, node: Node) -> None:
        if node.place is not None:
            del self._resident[node.place]
            self._free.append(node.place)
            node.place = None

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock


def _lowest(step: Item | None) -> int:
    return -1 if step is None else min(layer for lane in step.lanes for layer, _ in lane)


@functools.partial(jax.jit, static_argnums=0)
def _final(read, decoder, pool, rows, details):
    return read(decoder, pool[rows], details)


@functools.partial(jax.jit, donate_argnames="pool")
def _embed(decoder, pool, tokens, target):
    return pool.at[target].set(embed(decoder, jnp.maximum(tokens, 0)), mode="drop")


@functools.partial(jax.jit, donate_argnames="pool")
def _advance(
    decoder: Decoder,
    pool: Float[Array, "P T D"],
    tokens: Int[Array, "N T"],
    program: Program,
    source: Int[Array, " N"],
    target: Int[Array, " N"],
) -> Float[Array, "P T D"]:
    positions = jnp.where(tokens >= 0, jnp.arange(tokens.shape[1], dtype=jnp.int32), -1)
    return pool.at[target].set(run(decoder, pool[source], program, positions).h, mode="drop")
