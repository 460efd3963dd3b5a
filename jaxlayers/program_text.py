"""The text form of a program: text to items (`parse_items`) and items to canonical text (`pieces`).

    program := item {, item}
    item    := ( id[a|m] | id-id | (program) | [lane {, lane}] ) [ /mean | /fused | @k ] [ xN ] [ *s ]
    lane    := id[a|m] | id-id | id+id{+id}

An `Item` is what both sides share: one row of the table, or all the rows of one Newton item.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

WHOLE, ATTENTION, MLP = 0, 1, 2  # values of Program.part
SUM, MEAN, CONTINUE = 0, 1, 2  # values of Program.kind
MAX_VISITS = 4096
MAX_NESTING = 64
MAX_TEXT = 1_000_000

Visit = tuple[int, int]  # layer, part
Lane = tuple[Visit, ...]  # more than one visit: a fused group
Row = tuple[
    int, tuple[tuple[int, int, float, int, int], ...]
]  # kind, visits (layer, part, scale, group, slot)
LETTER = {WHOLE: "", ATTENTION: "a", MLP: "m"}


class Item(NamedTuple):
    """One expanded item: a row, or the `iterations` rows of a Newton item."""

    lanes: tuple[Lane, ...]
    kind: int = SUM  # SUM or MEAN
    iterations: int = 1
    scale: float = 1.0
    at: int = 0  # where its text starts, for messages

    @property
    def visits(self) -> int:
        return self.iterations * sum(map(len, self.lanes))


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# --- text to items ------------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n\f\v]*")
_DIGITS = re.compile(r"[0-9]+")  # not \d, which takes the digits of every script
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FORM = re.compile("mean|fused")
_DELIMITER = re.compile(r"[,()\[\]]|$")


def parse_items(text: str, depth: int) -> list[Item]:
    """The items of a program text with groups and repeats expanded, checked for a model of `depth` layers."""
    return _Parser(text, depth).parse()


class _Parser:
    """Recursive descent over the text; every failure is one sentence that names the item and its place."""

    def __init__(self, text: str, depth: int):
        if not isinstance(text, str):
            raise ValueError(f"a program is text such as '0-29', not an object of type {type(text).__name__}")
        if len(text) > MAX_TEXT:
            raise ValueError(
                f"the program text has {len(text)} characters, more than the limit of {MAX_TEXT}"
            )
        self.text, self.depth, self.at = text, depth, 0

    def parse(self) -> list[Item]:
        if not self.peek():
            raise ValueError(
                f"the program is empty: name at least one layer, for example '0-{self.depth - 1}'"
            )
        items = self.program(nesting=0)
        if self.peek():
            self.fail(self.at, f"{self.peek()!r} closes nothing; remove it or open it earlier", self.at + 1)
        rounded = []
        for item in items:
            with np.errstate(over="ignore", under="ignore"):
                scale = float(np.float32(item.scale)) + 0.0  # + 0.0 turns -0 into 0
            if not np.isfinite(scale):
                self.at = item.at
                self.fail(
                    item.at, "its scale is not a finite float32; use scales whose product is below 3.4e38"
                )
            rounded.append(item._replace(scale=scale))
        return rounded

    def fail(self, start: int, rule: str, stop: int | None = None) -> NoReturn:
        if stop is None:
            end = _DELIMITER.search(self.text, max(self.at, start))
            stop = end.start() if end else len(self.text)
        item = shorten(self.text[start:stop].strip(), 40)
        line = self.text.count("\n", 0, start)
        place = f"character {start - (self.text.rfind(chr(10), 0, start) + 1) + 1}"
        place = f"line {line + 1}, {place}" if line else place
        raise ValueError(f"program item {item!r} at {place}: {rule}")

    def peek(self) -> str:
        """The next character that is no white space, or '' at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        self.peek()
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match.group() if match else ""

    def char(self, wanted: str) -> bool:
        if self.peek() != wanted:
            return False
        self.at += 1
        return True

    def limit(self, start: int, visits: int) -> None:
        if visits > MAX_VISITS:
            self.fail(start, f"the program has more than {MAX_VISITS} visits; use smaller ranges or counts")

    def whole(self) -> int:
        """The number at this place, -1 if there is none; digits beyond any limit are cut, not converted."""
        digits = self.take(_DIGITS)
        return int(digits.lstrip("0")[:18] or "0") if digits else -1

    def count(self, start: int, sign: str) -> int:
        n = self.whole()
        if n < 1:
            self.fail(start, f"after {sign!r} comes a whole number of at least 1, for example {sign}2")
        return n

    def program(self, nesting: int) -> list[Item]:
        items, visits = [], 0
        while True:
            self.peek()
            start = self.at
            new = self.item(nesting)
            visits += sum(item.visits for item in new)
            self.limit(start, visits)
            items += new
            if not self.char(","):
                return items

    def item(self, nesting: int) -> list[Item]:
        first, start = self.peek(), self.at
        if first == "(":
            if nesting == MAX_NESTING:
                self.fail(start, f"groups nest more than {MAX_NESTING} deep; write the items out", start + 1)
            self.at += 1
            items = self.program(nesting + 1)
            if not self.char(")"):
                self.fail(start, "this '(' is not closed; write ')' after the last item of the group")
        elif first == "[":
            items = [self.bracket(start)]
        elif first in {"", ",", ")", "]"}:
            self.fail(
                start,
                "an item is missing here; write a layer, a range or a group, or remove the comma",
                start,
            )
        else:
            items = [Item(((visit,),), at=start) for visit in self.run(start)]

        if first != "[" and self.peek() in {"/", "@"}:
            self.fail(start, "/mean, /fused and @k stand only after ']'; write the layers inside [ ]")
        if self.char("x"):
            times = self.count(start, "x")
            self.limit(start, times * sum(item.visits for item in items))
            items = items * times
        if self.char("*"):
            factor = self.take(_NUMBER)
            if not factor or not np.isfinite(float(factor)):
                self.fail(start, "after '*' comes a finite number, for example *0.7")
            items = [item._replace(scale=item.scale * float(factor)) for item in items]
        if (rest := self.peek()) not in {"", ",", ")", "]"}:
            self.fail(start, _after_item(rest))
        return items

    def layer(self, start: int) -> int:
        self.peek()
        at = self.at
        layer = self.whole()
        if layer < 0:
            found = f"{self.peek()!r}" if self.peek() else "the end"
            self.fail(start, f"expected a layer id from 0 to {self.depth - 1} instead of {found}")
        if layer >= self.depth:
            name = shorten(self.text[at : self.at], 24)
            self.fail(start, f"layer {name} does not exist; ids of this model run from 0 to {self.depth - 1}")
        return layer

    def run(self, start: int) -> list[Visit]:
        """The visits of `id`, `ida`, `idm` or `id-id`."""
        first = self.layer(start)
        for part in (ATTENTION, MLP):
            if self.char(LETTER[part]):
                if self.peek() == "-":
                    self.fail(
                        start, "a range holds whole layers; write its branches one by one, as in 10a,11a"
                    )
                return [(first, part)]
        last = self.layer(start) if self.char("-") else first
        self.limit(start, abs(last - first) + 1)
        step = 1 if last >= first else -1
        return [(layer, WHOLE) for layer in range(first, last + step, step)]

    def bracket(self, start: int) -> Item:
        self.at += 1
        lanes: list[Lane] = []
        while not lanes or self.char(","):
            lanes += self.lane(start)
            self.limit(start, sum(map(len, lanes)))
        if not self.char("]"):
            self.fail(start, "this '[' is not closed; write ']' after its last lane")
        kind, iterations = SUM, 1
        if self.char("@"):
            iterations = self.count(start, "@")
        elif self.char("/"):
            form = self.take(_FORM)
            if not form:
                self.fail(start, "after '/' comes mean or fused")
            if form == "fused":
                lanes = [tuple(visit for lane in lanes for visit in lane)]
            elif len(lanes) > 1:  # the mean of one lane is its sum
                kind = MEAN
        if self.peek() in {"/", "@"}:
            rule = "a [ ] takes one of /mean, /fused and @k; fuse inside Newton as in [10+11,12+13]@2"
            self.fail(start, rule)
        item = Item(tuple(lanes), kind, iterations, at=start)
        self.limit(start, item.visits)
        return item

    def lane(self, bracket: int) -> list[Lane]:
        first, start = self.peek(), self.at
        if first == "":
            self.fail(bracket, "this '[' is not closed; write ']' after its last lane")
        if first in {",", "]"}:
            self.fail(start, "a lane is missing here; write a layer or remove the comma or the [ ]", start)
        if first in {"[", "("}:
            self.fail(start, f"{first!r} cannot stand inside [ ]; write its layers as lanes", start + 1)
        visits = self.run(start)
        if self.peek() == "+" and (len(visits) > 1 or visits[0][1] != WHOLE):
            self.fail(start, "'+' joins single whole layers, as in 10+11; use /fused for branches and ranges")
        fused = [visits[0]]
        while self.char("+"):
            fused.append((self.layer(start), WHOLE))
            self.limit(start, len(fused))
        if (rest := self.peek()) not in {"", ",", "]"}:
            rule = (
                f"{rest!r} cannot follow a lane, which is 10, 10a, 10m, 10-13 or 10+11; suffixes go after ']'"
            )
            self.fail(start, rule)
        return [tuple(fused)] if len(fused) > 1 else [(visit,) for visit in visits]


def _after_item(rest: str) -> str:
    """The rule that a character breaks by standing right after an item."""
    if rest in {"x", "*", "/", "@"}:
        return "suffixes stand in the order form, xN, *s and once each, as in [10-13]/mean x2*0.5"
    if rest == "+":
        return "'+' fuses layers only inside [ ], as in [10+11]"
    if rest in {"a", "m"}:
        return "a or m stands once and only after a single layer id, as in 10a,11a"
    if rest in {"(", "["}:
        return f"{rest!r} starts a new item; put ',' before it"
    return f"{rest!r} cannot follow an item; put ',' between items"


# --- items to text ------------------------------------------------------------------------------------------


def items_of(rows: Sequence[Row], depth: int) -> list[Item]:
    """The items of a table without padding; ValueError where no text could have made it."""
    items: list[Item] = []
    slot = 0

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"row {number} of this hand-made program has no text form: {reason}")

    number = 0
    for number, (kind, visits) in enumerate(rows):  # noqa: B007 (refuse reads it)
        lanes: list[Lane] = []
        for lane, group in itertools.groupby(visits, key=lambda visit: visit[3]):
            if lane != len(lanes):
                refuse("its groups are not numbered 0, 1, 2.. from left to right")
            lanes.append(tuple(visit[:2] for visit in group))
        scale = visits[0][2]
        if any(visit[2] != scale for visit in visits) or not np.isfinite(scale):
            refuse("its visits need one common finite scale")
        for layer, part, _, _, found in visits:
            if layer >= depth or part not in LETTER:
                refuse(f"it visits part {part} of layer {layer} in a model of {depth} layers")
            if found != (-1 if part == MLP else slot):
                refuse("its slots do not count the visits with attention in order")
            slot += part != MLP
        item = Item(tuple(lanes), MEAN if kind == MEAN else SUM, scale=scale)
        if kind == CONTINUE:
            head = items[-1] if items else None
            if head is None or head.kind == MEAN or head[0] != item.lanes or head.scale != scale:
                refuse("a continuation repeats the visits of the sum row before it")
            items[-1] = item = head._replace(iterations=head.iterations + 1)
        elif kind in {SUM, MEAN}:
            items.append(item)
        else:
            refuse(f"it has the unknown kind {kind}")
        needs_plus = len(lanes) > 1 or item.iterations > 1
        if needs_plus and any(len(lane) > 1 and any(part != WHOLE for _, part in lane) for lane in lanes):
            refuse("a fused group beside others or under Newton holds whole layers only")
    if not items or sum(item.visits for item in items) > MAX_VISITS:
        raise ValueError(f"this hand-made program has no text form: it needs 1 to {MAX_VISITS} visits")
    return items


def _runs(ids: Sequence[tuple[int, float] | None]) -> Iterator[tuple[int, int]]:
    """Half-open intervals of the maximal runs of (id, scale) with step 1 or -1; None stands alone."""
    start = 0
    while start < len(ids):
        stop, first = start + 1, ids[start]
        second = ids[stop] if stop < len(ids) else None
        if first and second and abs(step := second[0] - first[0]) == 1:
            while stop < len(ids) and ids[stop] == (first[0] + step * (stop - start), first[1]):
                stop += 1
        yield start, stop
        start = stop


def _visits_text(visits: Sequence[Visit]) -> str:
    """Single visits with runs of whole layers as ranges, for the inside of [ ]."""
    names = [f"{layer}{LETTER[part]}" for layer, part in visits]
    runs = _runs([(layer, 1.0) if part == WHOLE else None for layer, part in visits])
    return ",".join(names[a] if b == a + 1 else f"{names[a]}-{names[b - 1]}" for a, b in runs)


def ids_text(ids: Sequence[int]) -> str:
    return _visits_text([(i, WHOLE) for i in ids])


def scale_text(scale: float) -> str:
    """`*s` with the shortest text that parses back to this float32; empty for 1."""
    if scale == 1:
        return ""
    value = np.float32(scale)
    texts = [np.format_float_positional(value, trim="-"), np.format_float_scientific(value, trim="-")]
    texts[1] = re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], texts[1])
    # The parser rounds twice (text to float64 to float32): where that misses, the float64 digits are exact.
    texts = [text for text in texts if np.float32(float(text)) == value] or [repr(float(value))]
    return "*" + min(texts, key=len)


def item_text(item: Item) -> str:
    """The item without repeat and scale."""
    if len(item.lanes) == 1 and item.iterations == 1:
        text = _visits_text(item.lanes[0])
        return text if len(item.lanes[0]) == 1 else f"[{text}]/fused"
    lanes = []
    for single, group in itertools.groupby(item.lanes, key=lambda lane: len(lane) == 1):
        if single:
            lanes.append(_visits_text([lane[0] for lane in group]))
        else:
            lanes += ["+".join(str(layer) for layer, _ in lane) for lane in group]
    form = "/mean" if item.kind == MEAN else f"@{item.iterations}" if item.iterations > 1 else ""
    return f"[{','.join(lanes)}]{form}"


def is_single(item: Item) -> bool:
    return item.visits == 1


def pieces(items: Sequence[Item]) -> list[tuple[str, list[Item]]]:
    """The canonical text in pieces, each with the items it stands for: first repeats, then runs."""
    repeats = [list(group) for _, group in itertools.groupby(items)]
    ids = [
        (group[0].lanes[0][0][0], group[0].scale)
        if len(group) == 1 and is_single(group[0]) and group[0].lanes[0][0][1] == WHOLE
        else None
        for group in repeats
    ]
    found = []
    for start, stop in _runs(ids):
        covered = [item for group in repeats[start:stop] for item in group]
        text = item_text(covered[0])
        if stop > start + 1:
            text += f"-{item_text(covered[-1])}"
        elif len(covered) > 1:
            text += f"x{len(covered)}"
        found.append((text + scale_text(covered[0].scale), covered))
    return found


def meaning(items: list[Item]) -> str:
    """One piece of canonical text in words."""
    item, repeats = items[0], len(items)
    lanes = len(item.lanes)
    if is_single(item):
        branch = {WHOLE: "", ATTENTION: ", attention only", MLP: ", MLP only"}[item.lanes[0][0][1]]
        words = f"one layer{branch}"
        if items[-1] != item:
            words, repeats = f"{repeats} layers in sequence", 1
    elif item.iterations > 1:
        words = f"Newton: {item.iterations} iterations over {lanes} lane{'s' * (lanes > 1)}"
    elif lanes == 1:
        words = f"{item.visits} visits fused: all attentions, then all MLPs"
    else:
        words = f"{lanes} lanes side by side, h + their {'mean' if item.kind == MEAN else 'sum'}"
    words += f", {repeats} times" if repeats > 1 else ""
    return words if item.scale == 1 else f"{words}, branches times {scale_text(item.scale)[1:]}"
