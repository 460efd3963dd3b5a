"""The search tree: what it may propose, and that it goes where the reward is."""

import numpy as np
import pytest

from jaxlayers.search.cola import Random, Settings, Tree, search

DEPTH = 12


def searched(kind, settings, reward, batch=8, seed=0):
    tree = kind(DEPTH, settings, np.random.default_rng(seed))
    proposed = []
    while found := tree.propose(batch):
        proposed += found
        for ids in found:
            tree.reward(ids, reward(ids))
    return proposed


@pytest.mark.parametrize("kind", [Tree, Random])
def test_programs_are_distinct_and_the_first_is_the_plain_model(kind):
    proposed = searched(kind, Settings(simulations=100), lambda ids: 0.0)
    assert proposed[0] == tuple(range(DEPTH))
    assert len(set(proposed)) == len(proposed) == 100
    assert all(1 <= len(ids) <= 2 * DEPTH for ids in proposed)


@pytest.mark.parametrize("kind", [Tree, Random])
def test_skips_alone_keep_the_order_and_loops_alone_keep_every_layer(kind):
    for ids in searched(kind, Settings(simulations=60, loops=False), lambda ids: 1.0):
        assert list(ids) == sorted(set(ids))
    for ids in searched(kind, Settings(simulations=60, skips=False), lambda ids: 1.0):
        assert set(ids) == set(range(DEPTH))


def test_the_same_seed_proposes_the_same_and_another_differs():
    reward = lambda ids: float(5 not in ids)
    settings = Settings(simulations=80)
    assert searched(Tree, settings, reward) == searched(Tree, settings, reward)
    assert searched(Tree, settings, reward) != searched(Tree, settings, reward, seed=1)


def test_rewards_steer_the_tree():
    """Programs without layer 5 are right: the tree should try more of them than the control does."""
    reward = lambda ids: float(5 not in ids)
    settings = Settings(simulations=200, length_penalty=0.0)
    share = lambda kind: np.mean([reward(ids) for ids in searched(kind, settings, reward)])
    assert share(Tree) > share(Random) + 0.1


def test_a_pending_proposal_turns_the_next_ones_elsewhere():
    tree = Tree(DEPTH, Settings(simulations=50), np.random.default_rng(0))
    assert len(set(tree.propose(50))) == 50


@pytest.mark.parametrize("wrong", [{"simulations": 0}, {"skips": False, "loops": False}])
def test_settings_that_search_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=r"search|simulations"):
        Settings(**wrong)


def test_any_function_scores_programs():
    asked = []

    def scorer(programs):
        asked.append(len(programs))
        return [0.5 if 5 in program.layers else 1.0 for program in programs]

    settings = Settings(simulations=30)
    found = list(search(DEPTH, scorer, settings, seed=3, leaves=4))
    assert str(found[0][0]) == f"0-{DEPTH - 1}" and found[0][1] == 0.5
    assert max(asked) == 4 and sum(asked) == len(found) == len({str(program) for program, _ in found}) == 30
    assert all(reward == (0.5 if 5 in program.layers else 1.0) for program, reward in found)
    assert found == list(search(DEPTH, scorer, settings, seed=3, leaves=4))


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        (lambda programs: [1.0], "1 rewards for 4"),
        (lambda programs: [float("nan")] * len(programs), "finite"),
    ],
)
def test_a_scorer_that_gives_no_numbers_is_refused(scorer, words):
    with pytest.raises(ValueError, match=words):
        list(search(DEPTH, scorer, Settings(simulations=9), leaves=4))
