"""The vocabulary in a GGUF file as a tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxlayers.weights.strict import quoted

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
LONGEST_PIECE = 1024  # characters of a piece whose merges are derived: the work grows with the square
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space


class Vocabulary(NamedTuple):
    """A tokenizer without special tokens around the text, and what the file says of those."""

    backend: tokenizers.Tokenizer
    ids: dict[str, int]  # `bos`, `eos`, `eot`, `eom`, `unknown`, `padding`, as far as given
    add_bos: bool
    add_eos: bool


class _Rule(NamedTuple):
    """How text is cut into words before byte-level merges; the names are llama.cpp's."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    whole_words: bool = False  # a word that is a token needs no merges
    add_bos: bool = False


def _byte_level(*first: pre_tokenizers.PreTokenizer, gpt2: bool) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    return pre_tokenizers.Sequence([*first, last])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: _byte_level(pre_tokenizers.Split(Regex(pattern), "isolated"), gpt2=False)


# The published regular expressions of each family's tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Rule(_split(_WORDS + r"\p{N}{1,3}" + _REST), whole_words=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, _Rule] = {
    "gpt-2": _Rule(lambda: _byte_level(gpt2=True)),
    "smollm": _Rule(lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), gpt2=True)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Rule(_split(_WORDS + r"\p{N}" + _REST), normalizers.NFC),
    "tekken": _Rule(_split(_TEKKEN), whole_words=True, add_bos=True),
}


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Returns the tokenizer of the `tokenizer.ggml.*` keys; raises ValueError naming the key at fault.

    Tokens of type control (and the unknown token) become special tokens and those of type user-defined
    ordinary added ones: both are found in text before anything else, as in the model's tokenizer.json.
    """
    read = _Keys(metadata)
    model = read.text("model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model is {quoted(model)}, but only gpt2 and llama are supported")
    tokens = read.strings("tokens")
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        id = next(id for id, token in enumerate(tokens) if vocab[token] != id)
        raise ValueError(f"token {quoted(tokens[id])} stands twice, as ids {id} and {vocab[tokens[id]]}")
    types = read.numbers("token_type", len(tokens), np.full(len(tokens), NORMAL))
    ids = {name: read.id(name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    if model == "llama":
        for id, name in enumerate(("unknown", "bos", "eos")):  # where SentencePiece models have them
            if ids[name] is None and id < len(tokens) and types[id] in (UNKNOWN, CONTROL):
                ids[name] = id
        backend = _sentencepiece(read, vocab, types, ids["unknown"])
        add_bos = True
    else:
        pre = read.text("pre")
        if pre not in PRE_TOKENIZERS:
            raise ValueError(
                f"tokenizer.ggml.pre is {quoted(pre)}, a rule that is not known here; known are "
                f"{', '.join(PRE_TOKENIZERS)}"
            )
        backend = _byte_pairs(read, vocab, PRE_TOKENIZERS[pre])
        add_bos = PRE_TOKENIZERS[pre].add_bos
    special = {id for id in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL))).tolist()}
    added = [
        AddedToken(tokens[id], special=id in special, normalized=False)
        for id in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        if tokens[id]
    ]
    backend.add_tokens(added)
    given = {name: id for name, id in ids.items() if id is not None}
    adds = lambda name, default: read.flag(f"add_{name}_token", default) and name in given
    return Vocabulary(backend, given, adds("bos", add_bos), adds("eos", False))


def _byte_pairs(read: "_Keys", vocab: dict[str, int], rule: _Rule) -> tokenizers.Tokenizer:
    merges = []
    for number, line in enumerate(read.strings("merges")):
        # The separator is the space after the first character: a piece may start with one, never hold one.
        left, _, right = line[1:].partition(" ")
        left = line[:1] + left
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"merge {number}, {quoted(line)}, is not of two tokens that make a third")
        merges.append((left, right))
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words)
    backend = tokenizers.Tokenizer(model)
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.split()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    read: "_Keys", vocab: dict[str, int], types: np.ndarray, unknown: int | None
) -> tokenizers.Tokenizer:
    """Returns SentencePiece's BPE: always the pair whose union has the best score, bytes for the rest."""
    scores = read.numbers("scores", len(vocab))
    if not np.isfinite(scores).all():
        raise ValueError("tokenizer.ggml.scores holds a value that is not finite")
    normal = {token: id for token, id in vocab.items() if types[id] == NORMAL}
    if any(len(token) > LONGEST_PIECE for token in normal):
        raise ValueError(f"a token is longer than {LONGEST_PIECE} characters")
    merges = [
        (-float(scores[id]), id, normal[token[:cut]], normal[token[cut:]])
        for token, id in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    names = list(vocab)
    pairs = [(names[left], names[right]) for *_, left, right in sorted(merges)]
    byte_fallback = bool((types == BYTE).any())
    model = models.BPE(
        vocab=vocab,
        merges=pairs,
        unk_token=None if unknown is None else names[unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = read.flag("add_space_prefix", True)
    before = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


class _Keys:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata

    def _fault(self, name: str, rule: str) -> ValueError:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        found = "missing" if value is None else quoted(value) if np.isscalar(value) else "an array"
        return ValueError(f"tokenizer.ggml.{name} is {found}, but it must be {rule}")

    def _get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._fault(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        if value is not None and not isinstance(value, bool):
            raise self._fault(name, "true or false")
        return default if value is None else value

    def id(self, name: str, size: int) -> int | None:
        name = f"{name}_token_id"
        value = self._get(name)
        # -1, and its unsigned form, say that there is none.
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if type(value) is not int or not 0 <= value < size:
            raise self._fault(name, f"an id below {size}")
        return value

    def strings(self, name: str) -> Sequence[str]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._fault(name, "an array of strings")
        return value

    def numbers(self, name: str, size: int, default: np.ndarray | None = None) -> np.ndarray:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray) or value.shape != (size,):
            raise self._fault(name, f"an array of {size} numbers")
        return value
