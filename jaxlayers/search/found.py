"""What a search found: the programs tried for each task with their scores, and the file that keeps them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlayers.files import replacing
from jaxlayers.program import WHOLE
from jaxlayers.program_text import Item, parse_items
from jaxlayers.search.cola import Ids, program_of
from jaxlayers.search.tasks import FIELDS, Task
from jaxlayers.weights.strict import json_lines, parse_json, quoted

LONGEST_LINE = 1 << 26  # bytes of a search in a file


class Score(NamedTuple):
    """What one program does on one task."""

    ids: Ids
    right: bool
    logprob: float  # of the right answer, nats; NaN where the program overflows

    @property
    def likelihood(self) -> float:
        """The log-likelihood as what programs are ordered by: NaN is the least."""
        return -np.inf if np.isnan(self.logprob) else self.logprob

    @property
    def written(self) -> float | None:
        """The log-likelihood as JSON has it: None where it is not finite."""
        return self.logprob if np.isfinite(self.logprob) else None


class Found(NamedTuple):
    """All that a search tried for one task under one condition, in order; the first is the plain model."""

    task: Task
    condition: str
    scores: list[Score]

    @property
    def shortest(self) -> Score | None:
        """The shortest right program, the likeliest of equals; None where none is right."""
        right = [score for score in self.scores if score.right]
        return min(right, key=lambda score: (len(score.ids), -score.likelihood), default=None)

    @property
    def pareto(self) -> list[Score]:
        """The programs that no shorter one equals in being right and in likelihood, shortest first."""
        best, front = (False, -np.inf), []
        order = lambda score: (len(score.ids), not score.right, -score.likelihood)
        for score in sorted(self.scores, key=order):
            if (score.right, score.likelihood) > best:
                best = (score.right, score.likelihood)
                front.append(score)
        return front

    def record(self, depth: int) -> dict[str, Any]:
        """Returns the search as a JSON-able record that `read_found` reads, programs as canonical text."""
        line = lambda score: {
            "program": str(program_of(score.ids, depth)),
            "length": len(score.ids),
            "right": score.right,
            "logprob": score.written,
        }
        return {
            **{name: getattr(self.task, name) for name in FIELDS},
            "condition": self.condition,
            "base": line(self.scores[0]),
            "shortest": line(self.shortest) if self.shortest else None,
            "pareto": [line(score) for score in self.pareto],
            "programs": [line(score) for score in self.scores],
        }


def write_found(found: Sequence[Found], path: Path, depth: int) -> None:
    """Writes a record for each search as JSON lines, whole or not at all.

    Raises OSError in one sentence where it cannot be written.
    """
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            for each in found:
                file.write(json.dumps(each.record(depth), sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise type(error)(
            f"cannot write {path}: {error.strerror}; the journal keeps what was found."
        ) from error


def read_found(path: str | os.PathLike[str]) -> list[Found]:
    """Returns the searches in a file of `write_found`; log-likelihoods that are not finite become NaN.

    Each begins with the plain model, which tells the depth. Raises ValueError in one sentence with file and
    line for what is no search, one that stands twice, and models of two depths; OSError where the file cannot
    be read.
    """
    name, found, lines, depth = os.fspath(path), [], {}, 0
    for number, where, line in json_lines(path, LONGEST_LINE, "search", "searches"):
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
    if type(line["right"]) is not bool or type(line["logprob"]) not in (float, type(None)):
        raise TypeError
    return Score(ids, line["right"], np.nan if line["logprob"] is None else float(line["logprob"]))
