"""A second, small reading of the program text, for valid texts only."""

import re
from typing import NamedTuple


class Step(NamedTuple):
    """One item of a program after repeats, groups and scales are spelled out."""

    lanes: list[list[tuple[int, str]]]  # visits of each lane as (layer, branches), branches of "am"
    scale: float
    mean: bool = False
    iterations: int = 1  # of Newton; 1 is a plain row


def split(text: str) -> list[str]:
    """Returns the parts of `text` between commas outside all brackets."""
    parts, level = [""], 0
    for char in text:
        level += (char in "([") - (char in ")]")
        if char == "," and level == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def visits(text: str) -> list[tuple[int, str]]:
    """Returns `10`, `10a`, `10-13` or `10+11` as (layer, branches)."""
    if "-" in text:
        a, b = map(int, text.split("-"))
        return [(i, "am") for i in (range(a, b + 1) if a <= b else range(a, b - 1, -1))]
    return [(int(i.rstrip("am")), i[-1] if i[-1] in "am" else "am") for i in text.split("+")]


def steps(text: str) -> list[Step]:
    """Returns what a valid text says, in order."""
    out = []
    for item in split("".join(text.split())):
        found = re.fullmatch(r"(.+?)(/mean|/fused|@\d+)?(x\d+)?(\*[-+.\deE]+)?", item)
        assert found
        base, form, times, scale = found.groups()
        if base[0] == "(":
            new = steps(base[1:-1])
        elif base[0] == "[":
            lanes = []
            for lane in split(base[1:-1]):
                lanes += [visits(lane)] if "+" in lane else [[visit] for visit in visits(lane)]
            if form == "/fused":
                lanes = [[visit for lane in lanes for visit in lane]]
            new = [Step(lanes, 1.0, form == "/mean", int(form[1:]) if form and form[0] == "@" else 1)]
        else:
            new = [Step([[visit]], 1.0) for visit in visits(base)]
        by = float(scale[1:] if scale else 1)
        out += [step._replace(scale=step.scale * by) for step in new * int(times[1:] if times else 1)]
    return out
