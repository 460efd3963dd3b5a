"""Generation and scoring against plain loops over `forward`."""

from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlayers.decoder.config import DecoderConfig
from jaxlayers.decoder.stack import init, per_layer
from jaxlayers.evaluate import score
from jaxlayers.execute.rows import forward
from jaxlayers.generate import decode
from jaxlayers.generate.decode import generate
from jaxlayers.generate.sampling import Sampling
from jaxlayers.program import Program

DECODER = checkpoints.model(1).decoder
PROMPTS = [[5, 6, 7, 8, 9, 10], [40], [100, 3, 100]]
PROGRAM = Program.parse("0-1,[1-3]@2,2a,3*0.5", 4)
EACH = ["0-3", PROGRAM, "0,2-3,3"]  # a program for each prompt


@jax.jit
def padded_logits(decoder, tokens, program):
    return forward(decoder, tokens, program)


def next_logits(ids, program):
    """The logits after ids; what follows them is padding that causal attention does not see."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(padded_logits(DECODER, jnp.asarray(tokens), program))[0, len(ids) - 1]


def greedy(ids, count, program):
    new = []
    for _ in range(count):
        new.append(int(np.argmax(next_logits([*ids, *new], program))))
    return new


def collected(prompts, program=PROGRAM, **settings):
    rows = [[] for _ in prompts]
    for new in generate(DECODER, prompts, program, **settings):
        for row, ids in zip(rows, new, strict=True):
            row += ids
    return rows


@pytest.mark.parametrize("block", [1, 3, 16])
def test_greedy_is_a_loop_over_forward_whatever_the_block(block):
    found = collected(PROMPTS, max_tokens=20, block=block)
    assert found == [greedy(prompt, 20, PROGRAM) for prompt in PROMPTS]
    assert len({token for row in found for token in row}) > 10  # no mere repetition


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_a_ragged_batch_is_the_row_alone(temperature):
    sampling = Sampling(temperature, seed=5)
    together = collected(PROMPTS, max_tokens=12, sampling=sampling)
    for row, prompt in enumerate(PROMPTS):
        # A draw is seeded by its row, so that the other rows are others but the place is the same.
        others = [[1, 2], [9] * 30, [50]]
        others[row] = prompt
        assert collected(others, max_tokens=12, sampling=sampling)[row] == together[row]
    assert collected(PROMPTS[:1], max_tokens=12, sampling=sampling)[0] == together[0]


@pytest.mark.parametrize("block", [1, 16])
def test_each_prompt_may_have_its_program(block):
    found = collected(PROMPTS, EACH, max_tokens=20, block=block)
    expected = [
        greedy(prompt, 20, Program.parse(str(program), 4))
        for prompt, program in zip(PROMPTS, EACH, strict=True)
    ]
    assert found == expected
    stops = [found[0][4], found[1][9]]
    ends = [min([*(row.index(stop) + 1 for stop in stops if stop in row), 20]) for row in expected]
    cut = [row[:end] for row, end in zip(expected, ends, strict=True)]
    assert collected(PROMPTS, EACH, max_tokens=20, block=block, stops=stops) == cut


def test_the_programs_beside_it_do_not_change_a_draw():
    settings: dict[str, Any] = dict(max_tokens=12, sampling=Sampling(1.0, seed=5))
    together = collected(PROMPTS, EACH, **settings)
    assert together == collected(PROMPTS, EACH, block=3, **settings)
    for row, program in enumerate(EACH):
        assert collected(PROMPTS, program, **settings)[row] == together[row]
    # Only the place seeds a draw: another batch with this program in that place draws the same.
    assert collected(PROMPTS, [EACH[2], EACH[1], EACH[0]], **settings)[1] == together[1]


def test_equal_programs_and_other_sets_compile_no_loop_anew():
    before = decode.advance._cache_size()
    collected(PROMPTS, PROGRAM, max_tokens=20, block=5)
    collected(PROMPTS, EACH, max_tokens=20, block=5)
    assert decode.advance._cache_size() == before + 2
    same = collected(PROMPTS, [PROGRAM, str(PROGRAM), PROGRAM], max_tokens=20, block=5)
    assert same == collected(PROMPTS, PROGRAM, max_tokens=20, block=5)
    collected(PROMPTS, [PROGRAM, "0,2-3,3", None], max_tokens=20, block=5)
    assert decode.advance._cache_size() == before + 2


def test_draws_do_not_depend_on_the_block():
    settings: dict[str, Any] = dict(max_tokens=20, sampling=Sampling(1.0, top_p=0.95, seed=11))
    assert collected(PROMPTS, block=1, **settings) == collected(PROMPTS, block=16, **settings)


@pytest.mark.parametrize("block", [1, 3, 16])
def test_a_row_ends_after_its_stop_id(block):
    full = collected(PROMPTS, max_tokens=20)
    stops = [full[0][4], full[1][9]]
    found = collected(PROMPTS, max_tokens=20, stops=stops, block=block)
    for whole, row in zip(full, found, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stops]
        assert row == (whole[: ends[0] + 1] if ends else whole)


def test_blocks_come_as_they_are_made():
    blocks = list(generate(DECODER, [[1, 2]], PROGRAM, max_tokens=8, block=3))
    assert [len(block[0]) for block in blocks] == [1, 3, 3, 1]
    assert [len(b[0]) for b in generate(DECODER, [[1, 2]], PROGRAM, max_tokens=1)] == [1]
    early = generate(DECODER, [[1, 2]], PROGRAM, max_tokens=8, block=3)
    assert next(early) == blocks[0]
    early.close()


def test_the_form_of_the_layers_does_not_matter():
    settings: dict[str, Any] = dict(max_tokens=6)
    stacked = list(generate(DECODER, PROMPTS, PROGRAM, **settings))
    assert list(generate(per_layer(DECODER), PROMPTS, PROGRAM, **settings)) == stacked


def test_the_context_may_be_filled():
    prompt = list(range(200))
    assert len(collected([prompt], max_tokens=56)[0]) == 56
    with pytest.raises(ValueError, match="context is 256"):
        collected([prompt], max_tokens=57)


@pytest.mark.parametrize(
    "prompts, settings, match",
    [
        ([], {}, "no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1]], {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([[1, 267]], {}, r"id 267, outside the vocabulary 0\.\.266"),
        ([[-1]], {}, "id -1, outside"),
        ([[1]], {"sampling": Sampling(-1.0)}, "temperature"),
    ],
)
def test_wrong_input_is_named(prompts, settings, match):
    with pytest.raises(ValueError, match=match):
        collected(prompts, **settings)


def test_scores_are_sums_over_a_loop():
    prompt, choices = [4, 5, 6], [[7], [8, 9, 10], [11, 12], [7, 8]]
    expected = []
    for choice in choices:
        total = 0.0
        for i, token in enumerate(choice):
            logits = next_logits([*prompt, *choice[:i]], PROGRAM).astype(np.float64)
            total += logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        expected.append(total)
    np.testing.assert_allclose(score(DECODER, prompt, choices, PROGRAM), expected, atol=1e-4)
    for i, choice in enumerate(choices):
        np.testing.assert_allclose(score(DECODER, prompt, [choice], PROGRAM), expected[i : i + 1], atol=1e-4)


@pytest.mark.parametrize(
    "prompt, choices, match",
    [
        ([], [[1]], "prompt 0 is empty"),
        ([1], [], "at least one token"),
        ([1], [[2], []], "at least one token"),
        ([1], [[2] * 256], "context is 256"),
        ([1], [[2], [300]], "id 300"),
    ],
)
def test_scores_of_nothing_are_refused(prompt, choices, match):
    with pytest.raises(ValueError, match=match):
        score(DECODER, prompt, choices)


def test_a_cache_beyond_the_memory_is_refused_before_it_is_asked_for():
    config = DecoderConfig(
        vocab=16, embed=8, layers=2, heads=2, kv_heads=1, head_width=4, ffw=8, context=1 << 40
    )
    decoder = init(config, jax.random.key(0))
    with pytest.raises(MemoryError, match="ask for fewer tokens"):
        next(generate(decoder, [[1, 2]], max_tokens=(1 << 40) - 2))


def test_the_memory_is_that_of_the_slots_of_all_programs():
    programs = [f"{layer}x600" for layer in range(4)]
    config = checkpoints.config(context=1 << 40)
    decoder = init(config, jax.random.key(0))
    with pytest.raises(MemoryError, match="4 rows and 2560 slots"):
        next(generate(decoder, [[1]] * 4, programs, max_tokens=1 << 30))


def test_a_program_without_attention_needs_no_slot():
    program = Program.parse("0m,2m", 4)
    blocks = list(generate(DECODER, PROMPTS[:1], program, max_tokens=5))
    assert [token for block in blocks for token in block[0]] == greedy(PROMPTS[0], 5, program)


def test_logits_that_overflow_are_an_error_and_no_token():
    program = "3x20*1e38"
    with pytest.raises(ValueError, match="not finite"):
        list(generate(DECODER, PROMPTS[:1], program, max_tokens=3))
    with pytest.raises(ValueError, match="not finite"):
        score(DECODER, PROMPTS[0], [[1], [2]], program)
    with pytest.raises(ValueError, match=r"program 3x20\*1e38 gives logits that are not finite"):
        list(generate(DECODER, PROMPTS, ["0-3", program, None], max_tokens=3))


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[1.5, 2.7]], {}, "whole numbers"),
        ([[1]], {"stops": [1.5]}, "stops"),
        ([[1]], {"stops": [2**40]}, "stops"),
        ([[1]], {"block": 0}, "block"),
        ([[1]], {"max_tokens": 2.5}, "whole number"),
        ([1, 2], {}, "sequences of ids"),
        ("ab", {}, "sequences of ids"),
        ([[1]], {"program": 7}, "not int"),
        ([[1]], {"program": [7]}, "not int"),
        ([[1], [2]], {"program": ["0-3"]}, "1 programs for 2 prompts"),
        ([[1], [2]], {"program": []}, "0 programs for 2 prompts"),
        ([[1], [2]], {"program": ["0-3", "0-4"]}, "layer 4 does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(prompts, settings, words):
    with pytest.raises(ValueError, match=words):
        list(generate(DECODER, prompts, **settings))


def test_prompts_may_be_arrays_and_the_program_a_text():
    prompts = np.asarray([PROMPTS[0]])
    text = str(PROGRAM)
    found = [token for block in generate(DECODER, prompts, text, max_tokens=3) for token in block[0]]
    assert found == greedy(PROMPTS[0], 3, PROGRAM)
    assert score(DECODER, np.asarray(PROMPTS[0]), np.asarray([[7, 8]])).shape == (1,)
