"""How a program is found right or wrong on a task: from the states of one pass, without decoding.

Without choices a program is right when greedy decoding gives the answer and ends it there; with choices, when
the right one is the likeliest continuation. Prompt and answers are joined as ids (teacher forcing), and all
choices stand behind one prompt, each a branch that sees the prompt and itself.

Axis letters: N tasks; C answers or choices of a task; A tokens of an answer; M states read of a sequence.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlayers.decoder.stack import Decoder, unembed
from jaxlayers.search.tasks import Task
from jaxlayers.weights.strict import quoted
from jaxlayers.weights.tokenizer import Tokenizer


class Prepared(NamedTuple):
    """A task as ids: the prompt, and the answer, or each choice, tokenised alone."""

    task: Task
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    right: int  # index of the right one in answers

    @property
    def tokens(self) -> list[int]:
        """The prompt and all answers behind it, in one sequence."""
        return [*self.prompt, *(token for answer in self.answers for token in answer)]

    @property
    def positions(self) -> list[int]:
        """Of each token: every answer goes on where the prompt ends."""
        start = len(self.prompt)
        return [*range(start), *(start + i for answer in self.answers for i in range(len(answer)))]

    @property
    def branch(self) -> list[int]:
        """Of each token: 0 for the prompt, and a number for each answer."""
        return [0] * len(self.prompt) + [c for c, answer in enumerate(self.answers, 1) for _ in answer]


class Details(NamedTuple):
    """What decides a task besides its states: numpy arrays, which a batch stacks along a leading axis N."""

    reads: Int[np.ndarray, " M"]  # tokens whose states predict something
    steps: Int[np.ndarray, "C A+1"]  # index into reads: what predicts token i of an answer, and what follows
    answer: Int[np.ndarray, "C A"]  # ids of the answers, -1 pads
    open: Bool[np.ndarray, " C"]  # whether an answer ends inside what may be a word or number


class Reading(NamedTuple):
    """What a pass says about the answers of tasks."""

    correct: Bool[Array, "N C"]  # whether greedy decoding gives the answer and ends it there
    logprob: Float[Array, "N C"]  # of the answer after the prompt, in nats; NaN where the logits are
    length: Int[Array, "N C"]  # tokens of the answer; 0 where there is none


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


def details_of(group: Sequence[Prepared]) -> list[Details]:
    """Returns the details of each task, all of one shape."""
    M = max((states_read(each) for each in group), default=0)
    C = max((len(each.answers) for each in group), default=0)
    A = max((len(answer) for each in group for answer in each.answers), default=0)
    found = []
    for each in group:
        reads = [len(each.prompt) - 1]  # the state of the prompt's last token, then those of the answers'
        steps, answers, open = (
            np.zeros((C, A + 1), np.int32),
            np.full((C, A), -1, np.int32),
            np.zeros(C, bool),
        )
        texts, start = each.task.choices or (each.task.answer,), len(each.prompt)
        for c, (ids, text) in enumerate(zip(each.answers, texts, strict=True)):
            used = len(ids) - bool(each.task.choices)  # what follows a choice does not matter
            steps[c, 1 : used + 1] = range(len(reads), len(reads) + used)
            reads += range(start, start + used)
            answers[c, : len(ids)] = ids
            open[c] = in_word(text[-1])
            start += len(ids)
        padded = np.pad(np.asarray(reads, np.int32), (0, M - len(reads)), mode="edge")
        found.append(Details(padded, steps, answers, open))
    return found


def states_read(prepared: Prepared) -> int:
    """Returns how many states of a task are unembedded."""
    choices = len(prepared.task.choices)
    return 1 + sum(map(len, prepared.answers)) - choices


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


def read_answers(
    decoder: Decoder, h: Float[Array, "N T D"], details: Details, continues: Bool[Array, " V"]
) -> Reading:
    """Returns what the final states of tasks say; only those that predict something are unembedded."""
    return decide(
        unembed(decoder, jnp.take_along_axis(h, details.reads[..., None], axis=1)), details, continues
    )


def decide(logits: Float[Array, "N M V"], details: Details, continues: Bool[Array, " V"]) -> Reading:
    """Returns what the logits at `details.reads` say about the answers.

    An answer is correct where the greedy tokens are its own and the one after it does not continue a word or
    number that the answer ends in (`continues`): "12" is not the answer that "123" begins with. Each greedy
    token depends only on the tokens before it, and up to the first difference these are the answer's, so one
    pass decides what decoding would. Logits of NaN are never right.
    """
    _, steps, answer, open = details
    at_steps = lambda a: jnp.take_along_axis(a[:, None], steps, axis=2)
    total = at_steps(jax.nn.logsumexp(logits, axis=-1))  # NaN where a logit is
    greedy = at_steps(jnp.argmax(logits, axis=-1))

    there = answer >= 0
    length = jnp.sum(there, axis=-1)
    follows = jnp.take_along_axis(greedy, length[..., None], axis=-1)[..., 0]
    used = jnp.arange(steps.shape[-1]) <= length[..., None]
    equal = jnp.all((greedy[..., :-1] == answer) | ~there, axis=-1)
    finite = jnp.all(~jnp.isnan(total) | ~used, axis=-1)
    correct = equal & finite & ~(open & jnp.asarray(continues)[follows])

    N, _, V = logits.shape
    flat = (steps[..., :-1] * V + jnp.maximum(answer, 0)).reshape(N, -1)
    chosen = jnp.take_along_axis(logits.reshape(N, -1), flat, axis=1).reshape(answer.shape)
    return Reading(correct, jnp.sum(jnp.where(there, chosen - total[..., :-1], 0), axis=-1), length)


def best_choice(logprobs: Float[np.ndarray, " C"], lengths: Int[np.ndarray, " C"]) -> tuple[int, int]:
    """Returns the likeliest choice by log-likelihood, and by log-likelihood per token.

    The first of equals; -1 where a number is NaN, so that a program which overflows is not right by chance.
    """
    logprobs = np.asarray(logprobs, np.float64)
    if np.isnan(logprobs).any():
        return -1, -1
    return int(np.argmax(logprobs)), int(np.argmax(logprobs / np.asarray(lengths)))


def is_right(prepared: Prepared, reading: Reading, per_token: bool = False) -> bool:
    """Returns whether the reading of a task, without the axis N, decides it right.

    `per_token` compares choices by log-likelihood per token, which is fairer to long ones.
    """
    if not prepared.task.choices:
        return bool(reading.correct[0])
    C = len(prepared.answers)
    return best_choice(reading.logprob[:C], reading.length[:C])[per_token] == prepared.right
