"""Tokenizers against plain Python references, transformers, and damaged files."""

import functools
import itertools
import json
import random
import string

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel

from jaxlayers.weights.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "the thin thing then 12 2007 don't DON'T we're  don''t\n\n\tx =  [é] 日本 🙂 a1b22c333 4444 \r\n end "
MERGES = [
    "t h",
    "th e",
    "Ġ the",
    "i n",
    "Ġ t",
    "Ġt h",
    "Ġ Ġ",
    "1 2",
    "2 0",
    "Ġ 1",
    "Ġ1 2",
    "d o",
    "do n",
    "' t",
]
MERGES += [
    "Ã ©",
    "D O",
    "DO N",
    "Ċ Ċ",
    "Ġ d",
    "0 7",
    "20 07",
    "3 3",
    "33 3",
    "4 4",
    "Ċ ĊĊ",
    "ðŁ ĻĤ"[:0] or "e n",
]


def byte_level_metadata(pre="smollm", **keys):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in MERGES] + ["<think>", "zebra"]
    types = [3] * 3 + [1] * (len(tokens) - 5) + [4, 1]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHATML,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def sentencepiece_metadata(**keys):
    pieces = ["▁t", "he", "▁the", "in", "▁▁", "aa", "ab", "▁a", "▁ab", "the", "▁thin", "▁▁▁▁", "th"]
    pieces += ["▁th", "éa", "12"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += [*"▁abtheinxé12", "<|im_end|>", "<think>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 261) + [3, 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


@functools.cache
def byte_level(pre="smollm"):
    return Tokenizer.from_gguf(byte_level_metadata(pre))


@functools.cache
def sentencepiece(prefix=True):
    return Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=prefix))


GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": GPT2,
    "smollm": r"\p{N}|'(?:s|t|re|ve|m|ll|d)|(?: ?\p{L}+)| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "llama-bpe": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
}


def byte_level_reference(text, pattern, whole_words):
    """GPT-2's algorithm in its published form: words by a regular expression, merges by rank."""
    regex = pytest.importorskip("regex")
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    ids = {token: id for id, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    # bytes to printable characters, as in GPT-2's encoder.py
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(printable)))
    found = []
    for word in regex.findall(pattern, text):
        symbols = [letters[byte] for byte in word.encode()]
        if whole_words and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while pairs := [p for p in itertools.pairwise(symbols) if p in ranks]:
            best, merged = min(pairs, key=ranks.__getitem__), []
            while symbols:
                width = 2 if tuple(symbols[:2]) == best else 1
                merged.append("".join(symbols[:width]))
                symbols = symbols[width:]
            symbols = merged
        found += [ids[symbol] for symbol in symbols]
    return found


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_vocabularies_against_plain_python(pre):
    tokenizer, draw = byte_level(pre), random.Random(0)
    texts = [WORDS, " zebra", "zebra"] + [
        "".join(draw.choices([*"the in 12 07don'T\n\t\r[=éé日🙂", "  ", "12"], k=30)) for _ in range(200)
    ]
    for text in texts:
        expected = byte_level_reference(text, PATTERNS[pre], pre == "llama-bpe")
        assert tokenizer.encode(text, special=False) == expected, text
        assert tokenizer.decode(expected) == text


def test_tekken_splits_words_where_lower_case_turns_upper():
    tokenizer = byte_level("tekken")
    words = tokenizer.backend.pre_tokenizer.pre_tokenize_str("helloWorld don't 2024 A/B/\n")
    assert [word for word, _ in words] == ["hello", "World", "Ġdon", "'t", "Ġ", *"2024", "ĠA", "/B", "/Ċ"]


def sentencepiece_reference(text, prefix):
    """SentencePiece's BPE as it defines it: of all neighbours merge the pair whose union scores best."""
    metadata = sentencepiece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: id for id, token in enumerate(tokens)}
    normal = {t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1}
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        unions = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))
                  if a + b in normal]  # fmt: skip
        if not unions:
            break
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces = [[s] if s in normal else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [ids[piece] for group in pieces for piece in group]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_against_plain_python(prefix):
    tokenizer, draw = sentencepiece(prefix), random.Random(0)
    for _ in range(400):
        text = "".join(
            draw.choices([*"abthein x12é日🙂\n\0", "the", "thin", "  ", "    "], k=draw.randrange(30))
        )
        expected = sentencepiece_reference(text, prefix)
        assert tokenizer.encode(text, special=False) == expected, text
        assert tokenizer.decode(expected) == text
        assert tokenizer.encode(text) == ([1, *expected] if text else [])


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_special_and_user_defined_tokens_are_found_in_text(make):
    tokenizer = make()
    end, think = tokenizer.backend.token_to_id("<|im_end|>"), tokenizer.backend.token_to_id("<think>")
    ids = tokenizer.encode("the<|im_end|><think>in", special=False)
    assert ids.count(end) == 1 and ids.count(think) == 1
    assert tokenizer.decode(ids) == "the<think>in" if make is byte_level else "the<think> in"
    assert "<|im_end|>" in tokenizer.decode(ids, special=True)


def test_bos():
    smol, llama = byte_level(), sentencepiece()
    assert smol.encode("the") == smol.encode("the", special=False) and smol.bos == 1
    assert smol.encode("the", special=True)[0] == 1 and smol.encode("", special=True) == [1]
    assert llama.encode("the")[0] == 1 and llama.encode("the", special=True).count(1) == 1
    assert Tokenizer.from_gguf(byte_level_metadata("llama-bpe")).encode("the")[0] == 1
    both = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=True, add_eos_token=True))
    assert both.encode("the") == [1, *smol.encode("the"), 2]
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.bos_token_id"]
    without = Tokenizer.from_gguf(metadata)
    assert without.bos is None
    with pytest.raises(ValueError, match="no BOS"):
        without.encode("the", special=True)


def test_odd_texts():
    for tokenizer in (byte_level(), sentencepiece()):
        assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
        assert tokenizer.decode(tokenizer.encode("\0a\0")) == "\0a\0"
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\N{REPLACEMENT CHARACTER}b"
        text = "the thin 12 " * 87_000
        assert tokenizer.decode(tokenizer.encode(text)) == text
        for id in (-1, tokenizer.size, 2**31, 2**40):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                tokenizer.decode([3, id])
        assert tokenizer.decode(np.array(tokenizer.encode("the"), np.int32)) == "the"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_streaming_adds_up_to_decoding(data):
    tokenizer = data.draw(st.sampled_from([byte_level(), sentencepiece(), sentencepiece(False)]))
    text = st.text(st.sampled_from("the in12é日🙂\0 \ufffd<>")).map(tokenizer.encode)
    anything = st.lists(st.integers(0, tokenizer.size - 1), max_size=8)
    ids = [id for part in data.draw(st.lists(st.one_of(text, anything), max_size=6)) for id in part]
    special = data.draw(st.booleans())
    stream, pieces, at = tokenizer.stream(special), [], 0
    while at < len(ids):
        width = data.draw(st.integers(1, 3))
        pieces.append(stream.push(ids[at : at + width]))
        at += width
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, special)


def test_streaming_never_prints_half_a_character():
    for tokenizer in (byte_level(), sentencepiece()):
        stream = tokenizer.stream()
        pieces = [stream.push(id) for id in tokenizer.encode("a🙂é日 b", special=False)]
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) and len([p for p in pieces if p]) > 2
    assert stream.push([]) == "" and stream.flush() == ""


def test_chat():
    tokenizer = byte_level()
    text = "<|im_start|>user\nthe 12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render("the 12") == text
    assert tokenizer.chat("the 12") == tokenizer.encode(text, special=False)
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "in"}]
    assert tokenizer.render(messages, add_generation_prompt=False).count("<|im_end|>") == 2
    with pytest.raises(ValueError, match="no chat template"):
        sentencepiece().render("the")
    with pytest.raises(ValueError, match="list of messages"):
        tokenizer.render([])


def test_a_template_that_prints_bos_gives_one_bos():
    metadata = sentencepiece_metadata()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    ids = Tokenizer.from_gguf(metadata).chat("the")
    assert ids.count(1) == 1 and ids[0] == 1 and ids[-1] == 2


def test_stop_ids():
    assert byte_level().eos == (2,)
    plain = byte_level_metadata(eos_token_id=0)
    assert Tokenizer.from_gguf(plain).eos == (0, 2)  # the template ends a turn with <|im_end|>
    del plain["tokenizer.chat_template"]
    assert Tokenizer.from_gguf(plain).eos == (0,)
    assert Tokenizer.from_gguf(byte_level_metadata(eos_token_id=0, eot_token_id=5)).eos == (0, 5, 2)


@pytest.mark.parametrize(
    ("make", "keys", "match"),
    [
        (byte_level_metadata, {"pre": "default"}, "pre is 'default', a rule that is not known"),
        (byte_level_metadata, {"model": "t5"}, "model is 't5'"),
        (byte_level_metadata, {"merges": ["t h", "q u"]}, "merge 1, 'q u'"),
        (byte_level_metadata, {"merges": None}, "merges is missing"),
        (byte_level_metadata, {"tokens": ["a", "b", "a"]}, "'a' stands twice, as ids 0 and 2"),
        (byte_level_metadata, {"tokens": np.arange(3)}, "tokens is an array"),
        (byte_level_metadata, {"token_type": np.ones(3)}, "token_type is an array"),
        (byte_level_metadata, {"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        (byte_level_metadata, {"add_bos_token": 3}, "add_bos_token is 3"),
        (sentencepiece_metadata, {"scores": None}, "scores is missing"),
        (sentencepiece_metadata, {"scores": np.full(288, np.nan, np.float32)}, "scores"),
    ],
)
def test_broken_vocabularies_name_the_key(make, keys, match):
    with pytest.raises(ValueError, match=match) as caught:
        Tokenizer.from_gguf(make(**keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, lambda: byte_level("llama-bpe")])
def test_saved_folders_come_back(tmp_path, make):
    tokenizer = make()
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again is not None
    for text in (WORDS, "", "the<|im_end|>\n"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode(text, special=False) == tokenizer.encode(text, special=False)
        assert again.decode(again.encode(text)) == tokenizer.decode(again.encode(text))
    for name in ("bos", "eos", "pad", "size", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
    ("pre", "model_type"),
    [
        ("smollm", None),
        ("smollm", "llama"),
        ("llama-bpe", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2", "qwen3"),
        ("tekken", "mistral"),
        (None, "llama"),
        (None, "mistral"),
    ],
)
def test_saved_folders_load_in_transformers(tmp_path, pre, model_type):
    transformers = pytest.importorskip("transformers")
    tokenizer = sentencepiece() if pre is None else byte_level(pre)
    tokenizer.save(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (WORDS, "the<|im_end|> in<think>\n", "<think> the"):
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text, special=False)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos[0])
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": "the 12"}]
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == tokenizer.render(messages)


def hub_folder(folder, config=None, generation=None, **files):
    """A folder as one finds it on a hub: made with the tokenizers package alone."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate(["<s>", "</s>", *alphabet, "th", "the"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|eot_id|>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} if config is None else config
    for name, values in {"tokenizer_config": config, "generation_config": generation, **files}.items():
        if values is not None:
            (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def opened(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_folders(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    tokenizer = opened(hub_folder(tmp_path, generation={"eos_token_id": [1, 260]}))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.size) == (0, (1, 260), None, 261)
    # What a tokenizer.json says of truncation and padding is for training, not for prompts.
    assert tokenizer.encode("the the the the the")[0] == 0
    assert tokenizer.decode(tokenizer.encode("the the the the the")) == "the the the the the"
    for flag, expected in ((True, [0, 259]), (False, [259])):
        config = {"bos_token": "<s>", "add_bos_token": flag}
        tokenizer = opened(hub_folder(tmp_path, config, {"eos_token_id": 1}))
        assert tokenizer.encode("the") == expected and tokenizer.eos == (1,)
    hub_folder(tmp_path, {}, None, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "generation_config.json").unlink()
    tokenizer = opened(tmp_path)
    assert (tokenizer.bos, tokenizer.eos) == (0, (1,))


def test_chat_templates_of_folders(tmp_path):
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ eos_token }}<|eot_id|>"},
    ]
    tokenizer = opened(hub_folder(tmp_path, {"eos_token": "</s>", "chat_template": named}))
    assert tokenizer.render("x") == "D</s><|eot_id|>" and tokenizer.eos == (1, 260)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert opened(tmp_path).render("x") == "J"


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", "[]", "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3"),
        ("tokenizer_config.json", '{"eos_token": "nope"}', "eos_token is 'nope'"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is 3"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template has an entry"),
        ("generation_config.json", '{"eos_token_id": 1000}', "eos_token_id is 1000"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id is"),
        ("special_tokens_map.json", "nope", "special_tokens_map.json"),
    ],
)
def test_broken_folders_name_the_file(tmp_path, name, text, match):
    hub_folder(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def _mutate(text, draw):
    at = draw.randrange(len(text))
    match draw.randrange(5):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + draw.choice(string.printable) + text[at + 1 :]
        case 2:
            return text[:at] + text[at + draw.randrange(1, 60) :]
        case 3:
            cut = draw.randrange(len(text))
            return text[:at] + text[cut : cut + draw.randrange(1, 60)] + text[at:]
        case _:
            # Another value in the place of one: what a parser that checks only the syntax lets through.
            value = json.loads(text)
            spot, key = _spot(value, draw)
            spot[key] = draw.choice(
                [None, -1, 2**32 - 1, 2**63, 1e300, "", "x", [], {}, True, [[]], {"type": "x"}]
            )
            return json.dumps(value)


def _spot(value, draw):
    while True:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list) or not value[key] or draw.random() < 0.2:
            return value, key
        value = value[key]


@pytest.mark.slow
def test_mutated_folders_load_or_are_refused_in_one_sentence(tmp_path):
    byte_level().save(tmp_path / "a")
    sentencepiece().save(tmp_path / "b")
    hub_folder((tmp_path / "b"), {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML})
    loaded = 0
    for seed in range(600):
        draw = random.Random(seed)
        folder = tmp_path / draw.choice("ab")
        path = folder / draw.choice(["tokenizer.json"] * 3 + ["tokenizer_config.json"])
        original = path.read_text()
        path.write_text(_mutate(original, draw))
        try:
            tokenizer = Tokenizer.from_folder(folder)
            assert tokenizer is not None
            loaded += 1
            tokenizer.decode(tokenizer.encode("the thin 12 é🙂 <|im_end|>"))
            tokenizer.render("the")
        except ValueError as error:
            text = str(error)
            assert "\n" not in text and text.endswith(".") and len(text) < 700, text
        finally:
            path.write_text(original)
    assert 100 < loaded < 599
