"""Times two sides in turn."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Duel(NamedTuple):
    """Seconds of two sides, the median over rounds in which each ran once."""

    ours: float
    other: float
    ratio: float  # median over the rounds of other / ours: above 1 where ours is faster


def duel(ours: Callable[[], Any], other: Callable[[], Any], rounds: int = 9, pause: float = 0.25) -> Duel:
    """Returns the times of two functions that take turns, each warmed up twice before.

    A pause goes before each run, so that threads which the other side left spinning have gone to sleep. The
    ratio is taken in each round and then its median, so that a machine that slows down slows both.
    """
    for _ in range(2):
        jax.block_until_ready(ours())
        jax.block_until_ready(other())
    times = []
    for turn in range(rounds):
        sides = [ours, other] if turn % 2 == 0 else [other, ours]
        took = {}
        for side in sides:
            time.sleep(pause)
            begin = time.perf_counter()
            jax.block_until_ready(side())
            took[side] = time.perf_counter() - begin
        times.append((took[ours], took[other]))
    return Duel(
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(b / a for a, b in times),
    )
