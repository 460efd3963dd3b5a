"""Text around generation: stop strings, ends, streaming, prompts of several forms."""

import itertools
from typing import Any

import checkpoints
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlayers.generate import text as text_module
from jaxlayers.generate.sampling import Sampling
from jaxlayers.generate.text import generate_text
from jaxlayers.weights.hub import Model
from jaxlayers.weights.tokenizer import _add_special

MODEL = checkpoints.model(1)
TOKENIZER = checkpoints.tokenizer()
UNTEMPLATED = Model(MODEL.decoder, checkpoints.tokenizer(chat_template=None))


def fake(monkeypatch, ids, cuts=()):
    """Has generation yield the given ids, in blocks that end at the cuts."""

    def generate(decoder, prompts, program, *, stops, **_):
        ends = [i + 1 for i, token in enumerate(ids) if token in stops] or [len(ids)]
        edges = sorted({0, ends[0], *(cut for cut in cuts if cut < ends[0])})
        for start, stop in itertools.pairwise(edges):
            yield [list(ids[start:stop])] * len(prompts)

    monkeypatch.setattr(text_module, "generate", generate)


def run(**settings):
    """Returns the completion of one prompt, having checked that its pieces add up."""
    pieces = []
    done = generate_text(MODEL, "the", on_text=lambda row, piece: pieces.append((row, piece)), **settings)[0]
    assert "".join(piece for _, piece in pieces) == done.text
    assert all(row == 0 and piece for row, piece in pieces)
    return done


def cut_by_hand(ids, stop):
    """The text and the ids that a reader who looks at the text after every single id would keep."""
    stream, text = TOKENIZER.stream(), ""
    for n in range(len(ids) + 1):
        text += stream.push(ids[n]) if n < len(ids) else stream.flush()
        found = [text.index(each) for each in stop if each in text]
        if found:
            text = text[: min(found)]
            needed = next(n for n in range(len(ids) + 1) if TOKENIZER.decode(ids[:n]).startswith(text))
            return text, ids[:needed], "stop"
    return text, ids, "length"


@given(
    ids=st.lists(st.integers(2, 266), min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 29)),
    data=st.data(),
)
def test_stop_strings_cut_the_text_wherever_blocks_and_tokens_end(ids, cuts, data):
    text = TOKENIZER.decode(ids) or "x"
    at = data.draw(st.integers(0, len(text) - 1))
    stop = [text[at : at + data.draw(st.integers(1, 6))], data.draw(st.text(min_size=1, max_size=3))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake(monkeypatch, ids, cuts)
        done = run(stop=stop)
    assert (done.text, done.token_ids, done.reason) == cut_by_hand(ids, stop)


def test_nothing_is_shown_that_may_begin_a_stop_string(monkeypatch):
    ids = TOKENIZER.encode("abc END. EN END!")
    fake(monkeypatch, ids, range(len(ids)))
    shown = []
    done = generate_text(MODEL, "x", stop=["END!"], on_text=lambda _, piece: shown.append(piece))[0]
    assert done.text == "abc END. EN "
    assert "".join(shown) == done.text
    assert len(shown) > 5
    assert not any(piece.endswith(("E", "EN", "END")) for piece in shown)


def test_a_stop_string_at_the_start_leaves_nothing(monkeypatch):
    fake(monkeypatch, TOKENIZER.encode("abc"))
    done = run(stop=["a"])
    assert (done.text, done.token_ids, done.reason) == ("", [], "stop")


def test_an_unfinished_stop_string_is_text(monkeypatch):
    fake(monkeypatch, TOKENIZER.encode("and so EN"))
    assert run(stop=["END"]).text == "and so EN"
    fake(monkeypatch, [*TOKENIZER.encode("and so EN"), 1])
    done = run(stop=["END"])
    assert (done.text, done.reason) == ("and so EN", "eos")


def test_the_end_token_is_no_part_of_the_text(monkeypatch):
    ids = TOKENIZER.encode("the end")
    fake(monkeypatch, [*ids, 1, *ids])
    assert run()[:3] == ("the end", ids, "eos")
    # Ignored, it is an id like any other, and a special token has no text.
    assert run(ignore_eos=True)[:3] == ("the endthe end", [*ids, 1, *ids], "length")


def test_half_a_character_waits_for_the_rest(monkeypatch):
    ids = TOKENIZER.encode("né€😀")
    fake(monkeypatch, ids, range(len(ids)))
    shown = []
    generate_text(MODEL, "x", on_text=lambda _, piece: shown.append(piece))
    assert shown == ["n", "é", "€", "😀"]
    fake(monkeypatch, ids[:-1])
    assert run().text == "né€\N{REPLACEMENT CHARACTER}"


def test_ids_beyond_the_vocabulary_have_no_text(monkeypatch):
    ids = TOKENIZER.encode("ab")
    fake(monkeypatch, [ids[0], 300, ids[1], 400])
    assert run()[:3] == ("ab", [ids[0], 300, ids[1], 400], "length")
    assert run(stop=["b"])[:3] == ("a", [ids[0]], "stop")


def test_prompts_get_bos_once(monkeypatch):
    fake(monkeypatch, [50])
    tokenizer = checkpoints.tokenizer()
    _add_special(tokenizer.backend, tokenizer.bos, None)
    model = Model(MODEL.decoder, tokenizer)
    plain = tokenizer.encode("hi", special=False)
    assert generate_text(model, "hi")[0].prompt_ids == [0, *plain]
    (chat,) = generate_text(model, "hi", chat=True)
    assert chat.prompt_ids == tokenizer.encode("<s>[user]hi[assistant]", special=False)
    assert chat.prompt_ids.count(0) == 1
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    (spoken,) = generate_text(model, [messages], chat=True)
    assert tokenizer.decode(spoken.prompt_ids) == "[system]s[user]hi[assistant]"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_does_not_depend_on_the_block(temperature):
    settings: dict[str, Any] = dict(max_tokens=24, sampling=Sampling(temperature, seed=3), ignore_eos=True)
    whole = generate_text(MODEL, ["the thin", "and"], **settings)
    assert [len(done.token_ids) for done in whole] == [24, 24]
    assert whole == generate_text(MODEL, ["the thin", "and"], block=3, **settings)
    # A stop string ends its own row and leaves the other as it is.
    stop = [whole[0].text[5:7]]
    first, second = generate_text(MODEL, ["the thin", "and"], stop=stop, **settings)
    assert first[:3] == cut_by_hand(whole[0].token_ids, stop)
    assert second[:3] == cut_by_hand(whole[1].token_ids, stop)
    assert (first.reason, len(first.text)) == ("stop", whole[0].text.index(stop[0]))


def test_each_prompt_may_have_its_program():
    prompts, programs = ["the thin", "and"], ["0-3", "0,2-3"]
    found = generate_text(MODEL, prompts, programs, max_tokens=12)
    for row, program in enumerate(programs):
        assert generate_text(MODEL, prompts, program, max_tokens=12)[row] == found[row]
    assert found[0].text != generate_text(MODEL, prompts, programs[1], max_tokens=12)[0].text


def test_one_token():
    (done,) = generate_text(MODEL, "the", max_tokens=1)
    assert (len(done.token_ids), done.reason) == (1, "length")
    ends = Model(MODEL.decoder, checkpoints.tokenizer(eos=done.token_ids))
    assert generate_text(ends, "the", max_tokens=1)[0][:3] == ("", [], "eos")


@pytest.mark.parametrize(
    "model, prompts, settings, match",
    [
        (Model(MODEL.decoder, None), "a", {}, "no tokenizer"),
        (MODEL, "a", {"stop": ["x", ""]}, "stop string is empty"),
        (MODEL, "", {}, "prompt 0 is empty"),
        (MODEL, [], {}, "no prompt"),
        (MODEL, [[{"role": "user", "content": "a"}]], {}, "chat=True"),
        (MODEL, [{"role": "user", "content": "a"}], {"chat": True}, "list of messages"),
        (UNTEMPLATED, "a", {"chat": True}, "chat template"),
        (MODEL, "a", {"max_tokens": 0}, "max_tokens"),
        (MODEL, "a" * 250, {}, "context is 256"),
    ],
)
def test_wrong_input_is_named(model, prompts, settings, match):
    with pytest.raises(ValueError, match=match):
        generate_text(model, prompts, **settings)
