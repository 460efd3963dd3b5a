"""Text in, text out: the tokenizer around `generate`, stop strings and streaming."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxlayers.generate.decode import generate
from jaxlayers.generate.sampling import Sampling
from jaxlayers.program import Program
from jaxlayers.weights.hub import Model
from jaxlayers.weights.tokenizer import Message, Tokenizer

Reason = Literal["eos", "stop", "length"]


class Completion(NamedTuple):
    """What a model wrote after a prompt."""

    text: str  # without special tokens, cut before a stop string
    token_ids: list[int]  # the new ids, without the one that ended the text
    reason: Reason  # an end-of-text token, a stop string, or max_tokens
    prompt_ids: list[int]


def generate_text(
    model: Model,
    prompts: str | Sequence[str | Sequence[Message]],
    program: Program | str | Sequence[Program | str | None] | None = None,
    *,
    max_tokens: int = 64,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    chat: bool = False,
    ignore_eos: bool = False,
    on_text: Callable[[int, str], None] | None = None,
    block: int = 16,
) -> list[Completion]:
    """Returns what the model writes after each prompt; a str is a list of one.

    `program` is one for all prompts, or a sequence with one for each.
    With `chat` a prompt is what the user says, or a list of messages, and goes through the model's chat
    template. A text ends before one of the tokenizer's `eos` ids (unless `ignore_eos`), before a string of
    `stop`, or after `max_tokens`; ids that only a stop string needed are left out. `on_text(i, piece)` gets
    the text of prompt i as it comes, never a part that may turn out to begin a stop string. What is written
    does not depend on `block`, the tokens made between two looks at the text, nor on the other prompts,
    except that a prompt's place seeds its draws.

    Raises ValueError where the model has no tokenizer (or, with `chat`, no chat template) and as `generate`.
    """
    tokenizer = tokenizer_of(model)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    stop = [stop] if isinstance(stop, str) else list(stop)
    if not all(stop):
        raise ValueError("a stop string is empty; give at least one character.")
    if chat:
        ids = [tokenizer.chat(prompt) for prompt in prompts]
    elif all(isinstance(prompt, str) for prompt in prompts):
        ids = [tokenizer.encode(str(prompt)) for prompt in prompts]
    else:
        raise ValueError("without chat a prompt is a str; pass chat=True for lists of messages.")
    ends = () if ignore_eos else tokenizer.eos
    rows = [_Row(tokenizer, stop, _shower(on_text, i)) for i in range(len(ids))]
    for new in generate(
        model.decoder, ids, program, max_tokens=max_tokens, sampling=sampling, stops=ends, block=block
    ):
        for row, fresh in zip(rows, new, strict=True):
            for token in fresh:
                row.push(token, token in ends)
        if all(row.reason for row in rows):
            break
    return [row.completion(prompt) for row, prompt in zip(rows, ids, strict=True)]


def tokenizer_of(model: Model) -> Tokenizer:
    """Returns the model's tokenizer, or raises ValueError where it came without one."""
    if model.tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, which text needs; put its tokenizer.json in the folder."
        )
    return model.tokenizer


def _shower(on_text: Callable[[int, str], None] | None, row: int) -> Callable[[str], None]:
    return lambda piece: on_text(row, piece) if on_text and piece else None


class _Row:
    """The text of one prompt as its ids come, one by one, so that blocks leave no trace."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], show: Callable[[str], None]):
        self._tokenizer, self._stop, self._show = tokenizer, stop, show
        self._stream = tokenizer.stream()
        self._overlap = max(map(len, stop), default=1) - 1  # characters of a stop string that may be there
        self._shown = 0
        self.text = ""
        self.ids: list[int] = []
        self.reason: Reason | None = None

    def push(self, token: int, ends: bool) -> None:
        """Takes the next id; what comes after the text has ended is dropped."""
        if self.reason:
            return
        if ends:
            self._finish("eos")
            return
        self.ids.append(token)
        if self._known(token):
            self._grow(self._stream.push(token))

    def completion(self, prompt_ids: list[int]) -> Completion:
        """Returns the text with what was held back."""
        if self.reason is None:
            self._finish("length")
        assert self.reason
        return Completion(self.text, self.ids, self.reason, prompt_ids)

    def _finish(self, reason: Reason) -> None:
        self._grow(self._stream.flush())  # which may complete a stop string
        self.reason = self.reason or reason
        self._show(self.text[self._shown :])
        self._shown = len(self.text)

    def _grow(self, piece: str) -> None:
        start = max(0, len(self.text) - self._overlap)
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            while self.ids and self._decoded(self.ids[:-1]).startswith(self.text):
                self.ids.pop()
            self.reason = "stop"
        safe = len(self.text) if found else len(self.text) - self._unsure()
        self._show(self.text[self._shown : safe])
        self._shown = max(self._shown, safe)

    def _unsure(self) -> int:
        """Returns how many characters at the end may begin a stop string."""
        for n in range(min(self._overlap, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-n:]) for stop in self._stop):
                return n
        return 0

    def _known(self, token: int) -> bool:
        """Tells whether the id has a text: embeddings are often padded beyond the vocabulary."""
        return token < self._tokenizer.size and self._tokenizer.backend.id_to_token(token) is not None

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(filter(self._known, ids))
