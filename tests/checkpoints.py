"""Tiny random models with a tokenizer, for tests of what stands on top of them."""

from typing import Any

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import init
from jaxlayers.weights.export import export
from jaxlayers.weights.hub import Model
from jaxlayers.weights.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "t"), ("i", "n"), ("a", "n"), ("an", "d")]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(**settings: Any) -> Tokenizer:
    """Bytes, a few merges and four special tokens: 267 ids; `</s>` ends a text."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, **{"bos": 0, "eos": [1], "chat_template": TEMPLATE, **settings})


def config(**changes: Any) -> DecoderConfig:
    sizes = dict(vocab=267, embed=16, layers=4, heads=4, kv_heads=2, head_width=4, ffw=24, context=256)
    return DecoderConfig(**{**sizes, **changes})  # pyright: ignore[reportArgumentType]


def model(seed: int = 0, **changes: Any) -> Model:
    """A model whose greedy text is no mere repetition: its layers are stronger than a fresh model's."""
    decoder = init(config(**changes), jax.random.key(seed))
    decoder = jax.tree.map(lambda a: 3 * a, decoder)
    return Model(decoder, tokenizer())


def folder(path, seed: int = 0, **changes: Any):
    """Writes such a model as a Hugging Face folder and returns its path."""
    made = model(seed, **changes)
    return export(made.decoder, None, path, made.tokenizer)
