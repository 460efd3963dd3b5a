"""Tokenizers: text to ids and back, from a tokenizer.json or from the metadata of a GGUF file."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxlayers.weights.chat import ChatTemplate, one_sentence
from jaxlayers.weights.gguf_vocab import read_vocabulary
from jaxlayers.weights.strict import quoted, read_json

Message = Mapping[str, Any]

# Tokens that end a turn, in the spelling of public chat templates. One of them is a stop id when the
# vocabulary has it and the chat template writes it.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>")
LARGEST_JSON = 256 << 20  # bytes of a tokenizer.json: ten times the largest public one


class Tokenizer:
    """Text to token ids and back.

    `bos` and `pad` are ids or None. `eos` holds every id that ends a generation: the tokenizer's own end
    token, those that generation_config.json (in a GGUF file: `eot_token_id` and `eom_token_id`) names, and
    the known end-of-turn tokens (`TURN_ENDS`) that the chat template writes. `size` is one more than the
    largest id, which may be less than the rows of a padded embedding.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos: int | None = None,
        eos: Iterable[int] = (),
        pad: int | None = None,
        chat_template: str | None = None,
    ):
        """Wraps a `tokenizers.Tokenizer`; raises ValueError when an id is not in its vocabulary."""
        self.backend = backend
        backend.no_padding()
        backend.no_truncation()
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos, self.pad, self.chat_template = bos, pad, chat_template
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        turn_ends = [backend.token_to_id(token) for token in TURN_ENDS if token in (chat_template or "")]
        self.eos = tuple(dict.fromkeys([*eos, *(id for id in turn_ends if id is not None)]))
        for name, id in [("bos", bos), ("pad", pad), *(("eos", id) for id in self.eos)]:
            if id is not None:
                self._token(id, f"the {name} token id")
        self._template: ChatTemplate | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """Returns the tokenizer of a Hugging Face folder, or None when it has no tokenizer.json.

        Special tokens and the chat template come from tokenizer_config.json, special_tokens_map.json,
        generation_config.json and chat_template.jinja, as far as they are there. Raises ValueError in one
        sentence naming the file that is broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
        if len(data) > LARGEST_JSON:
            raise ValueError(f"{path} is larger than {LARGEST_JSON} bytes, too large for a tokenizer.")
        with one_sentence(f"{path} is not a tokenizer that can be read"):
            backend = tokenizers.Tokenizer.from_buffer(data)
        return _with_config(backend, folder)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Returns the tokenizer that the `tokenizer.*` keys of a GGUF file describe.

        Raises ValueError in one sentence for a vocabulary that is broken, a tokenizer model other than
        `gpt2` and `llama`, or a pre-tokenizer whose rule is not known here.
        """
        with one_sentence("The GGUF vocabulary cannot be read"):
            backend, ids, add_bos, add_eos = read_vocabulary(metadata)
            bos, eos = ids.get("bos"), ids.get("eos")
            _add_special(backend, bos if add_bos else None, eos if add_eos else None)
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"tokenizer.chat_template is {quoted(template)}, but it must be a string.")
        stops = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
        return cls(backend, bos, stops, ids.get("padding"), template)

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Returns the ids of a text.

        `special` None adds what the tokenizer adds by itself (BOS for Llama, nothing for SmolLM2 and Qwen),
        except that the empty text has no ids; False adds nothing; True starts with BOS in any case and
        raises ValueError when there is none. Special tokens written in the text are recognised. A lone
        surrogate, which is no character, is read as U+FFFD.
        """
        if not isinstance(text, str):
            raise TypeError(f"a tokenizer encodes a str, not {type(text).__name__}.")
        bos = self.bos if special else None
        if special and bos is None:
            raise ValueError("This tokenizer has no BOS token; encode with special=None or False.")
        if not text and not special:
            return []
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        with one_sentence("The text cannot be tokenised"):
            ids = self.backend.encode(text, add_special_tokens=special is not False).ids
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text of ids, without special tokens unless `special`.

        Bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary.
        """
        ids = self._checked(ids)
        with one_sentence("The ids cannot be decoded"):
            return self.backend.decode(ids, skip_special_tokens=not special)

    def stream(self, special: bool = False) -> "Stream":
        """Returns an incremental decoder, for printing tokens as they come."""
        return Stream(self, special)

    def render(
        self, messages: str | Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the prompt of a conversation as text, by the model's chat template.

        A str is one message of the user. `variables` reach the template (`enable_thinking=False`,
        `tools=[...]`). Raises ValueError in one sentence when there is no template or it fails.
        """
        if self.chat_template is None:
            raise ValueError("This model has no chat template; give it plain text, without the chat option.")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError("A conversation is a list of messages, each a dict with role and content.")
        if self._template is None:
            self._template = ChatTemplate(self.chat_template)
        names = {"bos_token": self.bos, "eos_token": self.eos[0] if self.eos else None, "pad_token": self.pad}
        names = {name: self.backend.id_to_token(id) for name, id in names.items() if id is not None}
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **{"tools": None, **names, **variables}
        )

    def chat(
        self, messages: str | Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the ids of a conversation; raises as `render`.

        The template writes every special token itself, so none is added. What a message says is not
        escaped: text that spells a special token becomes that token, as in transformers.
        """
        return self.encode(self.render(messages, add_generation_prompt, **variables), special=False)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json (the stop ids) into folder.

        `from_folder` and transformers' AutoTokenizer read them back with the same ids. (Where config.json is
        that of a qwen2, transformers 5 splits words by Qwen2's rule, not tokenizer.json's.) Raises OSError.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        names = {"bos_token": self.bos, "eos_token": self.eos[0] if self.eos else None, "pad_token": self.pad}
        config |= {name: self.backend.id_to_token(id) for name, id in names.items() if id is not None}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        generation = {"bos_token_id": self.bos, "eos_token_id": list(self.eos), "pad_token_id": self.pad}
        generation = {name: value for name, value in generation.items() if value not in (None, [])}
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        for name, values in (("tokenizer_config", config), ("generation_config", generation)):
            text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")

    def _token(self, id: int, what: str = "token id") -> str:
        token = self.backend.id_to_token(id) if 0 <= id < self.size else None
        if token is None:
            raise ValueError(f"{what} {id} is outside the vocabulary of {self.size} tokens.")
        return token

    def _checked(self, ids: Iterable[int]) -> list[int]:
        checked = [int(id) for id in ids]
        for id in checked:
            self._token(id)
        return checked


class Stream:
    """Decodes ids as they come: the texts that `push` and `flush` return add up to `decode` of all ids.

    Text is held back while it may still change: at a character whose last bytes are missing and, with byte
    fallback, inside a run of byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._tokenizer, self._keep_special = tokenizer, special
        # Decoding starts at the tokens printed last, not at the first new one: a decoder may treat the start
        # of a text differently (Llama's drops a space there).
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, ids: int | Iterable[int]) -> str:
        """Returns the text that further ids complete; raises ValueError for an id outside the vocabulary."""
        checked = self._tokenizer._checked([ids] if isinstance(ids, int) else ids)
        # Special tokens leave here: one at the start of the window would shift what starts a text.
        drop = set() if self._keep_special else self._tokenizer._special
        self._waiting += [id for id in checked if id not in drop]
        text = self._text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}") or self._in_bytes():
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """Returns what was held back, with U+FFFD for characters that stayed incomplete."""
        text = self._text()
        self._shown, self._waiting = [*self._shown, *self._waiting], []
        return text

    def _text(self) -> str:
        decode = lambda ids: self._tokenizer.decode(ids, self._keep_special)
        return decode(self._shown + self._waiting)[len(decode(self._shown)) :] if self._waiting else ""

    def _in_bytes(self) -> bool:
        # Byte fallback turns a run of byte tokens into text as a whole, and all of it into U+FFFD when a
        # single byte is wrong.
        return re.fullmatch("<0x[0-9A-F]{2}>", self._tokenizer._token(self._waiting[-1])) is not None


def _with_config(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    config_path, generation_path = folder / "tokenizer_config.json", folder / "generation_config.json"
    read = lambda path: read_json(path) if path.is_file() else {}
    config, generation = read(config_path), read(generation_path)
    names = {**read(folder / "special_tokens_map.json"), **config}

    def token(name: str) -> int | None:
        value = names.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            return None
        if not isinstance(content, str):
            raise ValueError(f"{config_path}: {name} is {quoted(value)}, but it must be a string or null.")
        id = backend.token_to_id(content)
        if id is None and name != "pad_token":  # a pad token that no id stands for is never needed
            raise ValueError(
                f"{config_path}: {name} is {quoted(content)}, which tokenizer.json does not have."
            )
        return id

    def listed(name: str) -> list[int]:
        value = generation.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(id) is int and id >= 0 and backend.id_to_token(min(id, 2**32 - 1)) for id in ids):
            raise ValueError(
                f"{generation_path}: {name} is {quoted(value)}, which is no id of the vocabulary."
            )
        return ids

    bos, eos, pad = token("bos_token"), token("eos_token"), token("pad_token")
    if bos is None and "bos_token" not in names:
        bos = next(iter(listed("bos_token_id")), None)
    flags = [config.get(name) for name in ("add_bos_token", "add_eos_token")]
    if any(type(flag) is bool for flag in flags):  # then they overrule tokenizer.json, as in transformers
        _add_special(backend, bos if flags[0] else None, eos if flags[1] else None)
    stops = ([] if eos is None else [eos]) + listed("eos_token_id")
    template = _chat_template(config.get("chat_template"), folder, config_path)
    with one_sentence(f"{folder / 'tokenizer.json'} is not a tokenizer that can be used"):
        return Tokenizer(backend, bos, stops, pad, template)


def _add_special(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes the tokenizer put BOS before and EOS after a text, where they are not None."""
    before, after = ([] if bos is None else ["bos:0"]), ([] if eos is None else ["eos:0"])
    # Labels of our own: a token's text may hold a colon, which the template's syntax would trip over.
    labels = [
        {"id": label, "ids": [id], "tokens": [backend.id_to_token(id)]}
        for label, id in (("bos", bos), ("eos", eos))
        if id is not None
    ]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", "$B:1", *after],
        special_tokens=labels,  # pyright: ignore[reportArgumentType]
    )


def _chat_template(value: Any, folder: Path, where: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text at byte {error.start}.") from None
    if isinstance(value, list):  # several named ones, of which `default` is for plain conversations
        try:
            named = {item["name"]: item["template"] for item in value}
        except (TypeError, KeyError):
            raise ValueError(f"{where}: chat_template has an entry without name and template.") from None
        value = named.get("default", next(iter(named.values()), None))
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: chat_template is {quoted(value)}, but it must be a string.")
    return value
