"""A search of programs against the compiled `run` called on one program at a time."""

import jax
import numpy as np

from jaxlayers.bench.timing import duel
from jaxlayers.decoder.stack import embed, fastest_form
from jaxlayers.execute.rows import run
from jaxlayers.generate.text import tokenizer_of
from jaxlayers.search.answers import continuations, details_of, is_right, read_answers
from jaxlayers.search.campaign import Campaign, conditions
from jaxlayers.search.cola import program_of
from jaxlayers.search.made_tasks import make_tasks
from jaxlayers.search.tasks import spread
from jaxlayers.weights.hub import load

TASKS = 20
SIMULATIONS = 40  # of a task
ALONE = 60  # of the programs that the search scored, run one at a time


def bench_search(model: str) -> dict:
    """Returns the programs scored in a second by a search over those of `run` alone, and both.

    The search is CoLa, with all it does on the host. The other side is one compiled function of one sequence
    and one program, padded to one shape, which scores in the same way; it is given programs drawn from those
    that the search scored.
    """
    loaded = load(model, dtype="float32")
    tokenizer = tokenizer_of(loaded)
    tasks = spread([task for task in make_tasks() if task.split == "test"], TASKS)

    def ours():
        campaign = Campaign(loaded.decoder, tokenizer, tasks, conditions(SIMULATIONS)[:1])
        return campaign, [found for group in campaign.run() for found in group]

    campaign, found = ours()
    scored = {each.task.id: each.scores for each in found}
    prepared = [each for _, group in campaign.work for each in group]
    T = max(len(each.tokens) for each in prepared)
    rows = max(len(score.ids) for scores in scored.values() for score in scores)
    padded = lambda row, fill: np.pad(np.asarray(row, np.int32), (0, T - len(row)), constant_values=fill)[
        None
    ]
    rng = np.random.default_rng(0)
    details = details_of(prepared)
    jobs = []
    for turn in range(ALONE):
        place = turn % len(prepared)
        each = prepared[place]
        score = scored[each.task.id][rng.integers(len(scored[each.task.id]))]
        jobs.append(
            (
                each,
                score,
                program_of(score.ids, campaign.depth).pad(rows, 1, rows),
                (padded(each.tokens, 0), padded(each.positions, -1), padded(each.branch, 0)),
                jax.tree.map(lambda a: a[None], details[place]),
            )
        )
    decoder = fastest_form(loaded.decoder)
    mask = continuations(tokenizer, decoder.config.vocab)

    @jax.jit
    def alone(decoder, inputs, program, details):
        tokens, positions, branch = inputs
        h = run(decoder, embed(decoder, tokens), program, positions, branch=branch).h
        return read_answers(decoder, h, details, mask)

    def other():
        readings = []
        for _, _, program, inputs, details in jobs:
            reading = alone(decoder, inputs, program, details)
            readings.append(jax.tree.map(lambda a: np.asarray(a)[0], reading))
        return readings

    readings = other()
    differ = [abs(r.logprob[each.right] - s.logprob) for r, (each, s, *_) in zip(readings, jobs, strict=True)]
    same = [is_right(each, r) == s.right for r, (each, s, *_) in zip(readings, jobs, strict=True)]
    programs = sum(map(len, scored.values()))
    took = duel(lambda: bool(ours()), other, rounds=3)
    return {
        "ratio": took.ratio * programs / len(jobs),
        "ours_programs_per_second": programs / took.ours,
        "other_programs_per_second": len(jobs) / took.other,
        "compared": f"CoLa on {len(tasks)} tasks, {SIMULATIONS} simulations each ({programs} programs), and "
        f"the compiled run of {len(jobs)} of its programs one at a time, {T} tokens, float32",
        "visits": campaign.visits,
        "visits_alone": campaign.lengths,
        "largest_difference": float(max(differ)),
        "same_verdicts": all(same),
    }
