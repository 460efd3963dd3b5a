"""Many programs for one or several inputs: a shared prefix runs once, and equal steps run together.

The programs of an input form a trie whose edges are steps (a row, or a Newton row with its continuations). A
node's state is the residual stream after its steps. Pending edges with the same step, of whatever input, are
packed into one call, their tokens one behind another without padding. States live in one pool of fixed size;
the least recently used go first, and what is needed again is computed again from the nearest state left.
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

SHORT = 16  # tokens that each input is counted for at least, to bound the inputs of a call
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
    """Runs programs over inputs.

    Args:
      decoder: the model; on CPU the `per_layer` form is the faster.
      length: tokens an input holds at most, T.
      read: makes results of final states: (decoder, states [N, T, D], details with a leading axis N) -> a
        tree of arrays with a leading axis N. It is compiled once for each function.
      budget: bytes for states; at least one state is kept.
      pack: tokens worked on together at most, or one input's.

    `visits` counts the visits executed, repeated ones after an eviction included.
    """

    def __init__(self, decoder: Decoder, length: int, read: Read, budget: int = 1 << 28, pack: int = 512):
        if length < 1 or pack < 1:
            raise ValueError(f"length {length} and pack {pack} must be at least 1.")
        self.decoder = decoder
        self.length = length
        self.pack = max(pack, length)
        self.most = max(self.pack // SHORT, 1)  # states in a call
        self.visits = 0
        width = decoder.config.embed
        dtype = jnp.promote_types(jax.tree.leaves(decoder.embedding)[0].dtype, jnp.float32)
        self.places = max(1, budget // (length * width * dtype.itemsize))
        self._pool = jnp.zeros((self.places * length, width), dtype)
        self._free = list(range(self.places))
        self._resident: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._inputs: list[np.ndarray] = []  # tokens, positions and branches [3, T], without padding
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
        positions, branch = positions or list(range(n)), branch or [0] * n
        if not n == len(positions) == len(branch):
            raise ValueError(f"positions and branch must be given for each of the {n} tokens.")
        self._inputs.append(np.asarray([tokens, positions, branch], np.int32))
        self._roots.append(Node(len(self._roots), None, None))
        return len(self._roots) - 1

    def clear(self) -> None:
        """Forgets all inputs and states, as in a new forest; what was compiled stays."""
        self._free = list(range(self.places))
        self._resident.clear()
        self._inputs.clear()
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
            pressed = self.places - len(front.waiting) < self.most
            if front.stale or pressed:
                front = Frontier(wanted)
            ready = self._readable(jobs, wanted, readers)
            # Reading waits for a full call too, as long as there is room.
            if len(ready) == self.most or (ready and (pressed or not front.edges)):
                self._read_some(jobs, ready, readers, results)
                for node in ready:
                    del wanted[node]
                    front.read(node)
            else:
                step, nodes = front.choose(pressed, self.most // 2)
                self._compute(step, self._fitting(nodes), front)
        return results

    def _readable(self, jobs, wanted, readers) -> list[Node]:
        """Returns states to read in one call: those whose details have one shape, of which there are most."""
        kinds: dict[Any, list[Node]] = defaultdict(list)
        for node in wanted:
            if node.place is not None:
                kinds[_shapes(jobs[readers[node][0]][2])].append(node)
        return max(kinds.values(), key=len, default=[])[: self.most]

    def _fitting(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns the first of the nodes, as many as one call holds."""
        kept, room = [], self.pack
        for node in nodes:
            room -= max(self._inputs[node.input].shape[1], SHORT)
            if kept and (room < 0 or len(kept) == self.most):
                break
            kept.append(node)
        return kept

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
        packed, tokens, target, source = self._packed(kept, places, sources)
        if step is None:
            self._pool = _embed(self.decoder, self._pool, tokens[0], target)
        else:
            part, program = self._isolated(step)
            self._pool = _advance(part, self._pool, tokens, program, packed, source, target)
            self.visits += program.visits * len(kept)
        for node, place in zip(kept, places, strict=True):
            node.place = place
            self._resident[node] = None
            if node.parent is not None and node.parent.place is not None:
                self._resident.move_to_end(node.parent)
            front.done(node)

    def _packed(self, nodes: list[Node], places: list[int], sources: list[int]):
        """Returns where each token of the nodes stands in a call, the call's tokens, and in the pool."""
        inputs = [self._inputs[node.input] for node in nodes]
        lengths = [part.shape[1] for part in inputs]
        size = bucket(max(sum(lengths), SHORT * len(nodes)), self.pack, steps=2)
        packed = np.full((max(size // SHORT, 1), self.length), size, np.int32)
        tokens = np.zeros((3, size), np.int32)
        tokens[1] = -1
        source, target = np.zeros(size, np.int32), np.full(size, self.places * self.length, np.int32)
        start = 0
        for row, (part, n) in enumerate(zip(inputs, lengths, strict=True)):
            here = slice(start, start + n)
            packed[row, :n] = range(start, start + n)
            tokens[:, here] = part
            source[here] = sources[row] * self.length + np.arange(n)
            target[here] = places[row] * self.length + np.arange(n)
            start += n
        return packed, tokens, target, source

    def _read_some(self, jobs, nodes, readers, results) -> None:
        pairs = [(node, number) for node in nodes for number in readers[node]]
        for start in range(0, len(pairs), self.most):
            part = pairs[start : start + self.most]
            size = bucket(len(part), self.most)
            part = part + [part[-1]] * (size - len(part))
            rows = np.asarray([node.place for node, _ in part], np.int32)
            details = jax.tree.map(lambda *a: np.stack(a), *[jobs[number][2] for _, number in part])
            found = _final(self._read, self.length, self.decoder, self._pool, rows, details)
            found = jax.tree.map(np.asarray, found)
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

    def choose(self, pressed: bool, enough: int) -> tuple[Item | None, Iterable[Node]]:
        """Returns a step and the nodes to reach by it.

        It is a step that enough nodes wait for, else that of the lowest layer: the others gain company by
        waiting, because most programs climb. Where places run out it is the first job's, so that one always
        moves.
        """
        rank = lambda step: (len(self.edges[step]) < enough, _lowest(step))
        step = next(iter(self.edges)) if pressed else min(self.edges, key=rank)
        return step, self.edges[step]

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


def _shapes(details: Any) -> tuple:
    return tuple(np.shape(a) for a in jax.tree.leaves(details))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _final(read, length, decoder, pool, rows, details):
    return read(decoder, pool.reshape(-1, length, pool.shape[1])[rows], details)


@functools.partial(jax.jit, donate_argnames="pool")
def _embed(decoder, pool, tokens, target):
    return pool.at[target].set(embed(decoder, tokens), mode="drop")


@functools.partial(jax.jit, donate_argnames="pool")
def _advance(
    decoder: Decoder,
    pool: Float[Array, "P*T D"],
    tokens: Int[Array, "3 S"],
    program: Program,
    packed: Int[Array, "N T"],
    source: Int[Array, " S"],
    target: Int[Array, " S"],
) -> Float[Array, "P*T D"]:
    _, positions, branch = tokens[:, None]
    h = run(decoder, pool[source][None], program, positions, branch=branch, packed=packed).h
    return pool.at[target].set(h[0], mode="drop")
