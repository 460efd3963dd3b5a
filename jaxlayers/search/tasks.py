"""Tasks with a known answer: read and written as JSON lines.

A task is a prompt and the exact text that must follow it: after a prompt that ends without a space the answer
starts with one (" Paris"). How a program is found right or wrong on one is in `answers.py`; `made_tasks.py`
makes some.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Sequence

from jaxlayers.files import replacing
from jaxlayers.weights.strict import json_lines, parse_json, quoted

LONGEST_LINE = 1 << 20  # bytes of a line of a task file


@dataclasses.dataclass(frozen=True)
class Task:
    """A prompt and the text that must follow it; with choices, the answer is the right one's text.

    `where` is the file and line it was read from, for messages. Raises ValueError in one sentence for an
    empty id, prompt or answer, a field of the wrong type, fewer than two choices, equal ones, or an answer
    that is none of them.
    """

    id: str
    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    kind: str = ""
    level: int = 0
    split: str = ""
    where: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self):
        for name in ("id", "prompt", "answer", "kind", "split"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"{name} is {quoted(value)}, but it must be a string.")
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"{name} holds half a character (a lone surrogate); write it whole.")
        for name in ("id", "prompt", "answer"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty.")
        if type(self.level) is not int or self.level < 0:
            raise ValueError(f"level is {quoted(self.level)}, but it must be a whole number of at least 0.")
        if not isinstance(self.choices, tuple) or not all(isinstance(text, str) for text in self.choices):
            raise ValueError(f"choices is {quoted(self.choices)}, but it must be a list of strings.")
        if not self.choices:
            return
        if len(self.choices) < 2 or not all(text.strip() for text in self.choices):
            raise ValueError(
                f"choices is {quoted(self.choices)}, but it must be two texts or more, none empty."
            )
        if len(set(self.choices)) < len(self.choices):
            raise ValueError(f"choices holds a text twice: {quoted(self.choices)}.")
        if self.answer not in self.choices:
            raise ValueError(f"the answer {quoted(self.answer)} is not one of the choices.")


FIELDS = tuple(field.name for field in dataclasses.fields(Task) if field.name != "where")


def read_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """Returns the tasks of a file of JSON lines; blank lines are skipped.

    Raises ValueError in one sentence with file and line for whatever is no task (see `Task`), a field that is
    missing or unknown, an id that stands twice, and a file without tasks; OSError where it cannot be read.
    """
    name, tasks, lines = os.fspath(path), [], {}
    for number, where, line in json_lines(path, LONGEST_LINE, "task", "tasks"):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        task = _parse(line, where)
        if task.id in lines:
            raise ValueError(f"{where}: the id {quoted(task.id)} stands in line {lines[task.id]} too.")
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ValueError(
            f'{name} holds no task; a task is a line {{"id": ..., "prompt": ..., "answer": ...}}.'
        )
    return tasks


def _parse(line: bytes, where: str) -> Task:
    fields = parse_json(line, where)
    for name in ("id", "prompt", "answer"):
        if name not in fields:
            raise ValueError(f"{where}: the field {name} is missing.")
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"{where}: {quoted(name)} is no field of a task; they are {', '.join(FIELDS)}.")
    if "choices" in fields:
        if not isinstance(fields["choices"], list) or not fields["choices"]:
            raise ValueError(
                f"{where}: choices is {quoted(fields['choices'])}, but it must be a list of texts."
            )
        fields["choices"] = tuple(fields["choices"])
    try:
        return Task(**fields, where=where)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def spread(tasks: Sequence[Task], count: int | None) -> list[Task]:
    """Returns `count` of the tasks, or all, in their order and spread evenly over kinds and levels."""
    if count is None:
        return list(tasks)
    by: dict[tuple[str, int], list[Task]] = {}
    for task in tasks:
        by.setdefault((task.kind, task.level), []).append(task)
    rounds = itertools.zip_longest(*by.values())
    chosen = [task.id for turn in rounds for task in turn if task is not None][: max(count, 0)]
    return [task for task in tasks if task.id in set(chosen)]


def write_tasks(tasks: Iterable[Task], path: str | os.PathLike[str]) -> None:
    """Writes tasks as JSON lines; a reader sees the old file or the new one, never half of it.

    Raises OSError in one sentence where it cannot be written, on a full disk too.
    """
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            for task in tasks:
                fields = {name: getattr(task, name) for name in FIELDS}
                fields = {name: value for name, value in fields.items() if value not in ((), "", 0)}
                file.write(json.dumps(fields, sort_keys=True) + "\n")
    except OSError as error:
        raise type(error)(f"cannot write the tasks to {os.fspath(path)}: {error.strerror}.") from error
