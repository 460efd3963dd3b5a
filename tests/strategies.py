"""Hypothesis strategies that several test files share."""

from hypothesis import strategies as st


def program_texts(depth: int) -> st.SearchStrategy[str]:
    """Valid program texts over the whole grammar for a model of `depth` layers.

    At most 3 items of 2 levels of groups of 2 items, a repeat of 2 everywhere, and 3 iterations over 3 lanes
    of 4 layers: 3 * (2 * 2)**2 * 2 * 36 = 3456 visits, below the limit of 4096; most have a few dozen.
    """
    layers = st.integers(0, depth - 1)
    ids = layers.map(str)
    parts = st.tuples(ids, st.sampled_from("am")).map("".join)
    spaces = st.sampled_from(["", "", "", " ", "\n", "\t "])
    scales = st.one_of(
        st.sampled_from(["0", "1", "-1", "0.7", ".5", "2.", "+3", "-0.0", "1e-3", "2.5E+1", "1e-46"]),
        st.floats(-100, 100, width=32).map(repr),
    )

    def ranges(longest: int) -> st.SearchStrategy[str]:
        def end(start: int) -> st.SearchStrategy[str]:
            last = st.integers(max(0, start - longest + 1), min(depth - 1, start + longest - 1))
            return last.map(lambda stop: f"{start}-{stop}")

        return layers.flatmap(end)

    def spaced(*tokens: st.SearchStrategy[str] | str) -> st.SearchStrategy[str]:
        """The tokens one after another, with or without white space before each."""
        drawn = [st.just(token) if isinstance(token, str) else token for token in tokens]
        return st.tuples(*(part for token in drawn for part in (spaces, token))).map("".join)

    def maybe(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(st.just(""), strategy)

    def joined(item: st.SearchStrategy[str], most: int) -> st.SearchStrategy[str]:
        return st.lists(item, min_size=1, max_size=most).map(",".join)

    def repeat(most: int) -> st.SearchStrategy[str]:
        return maybe(spaced("x", st.integers(1, most).map(str)))

    scale = maybe(spaced("*", scales))
    form = maybe(st.one_of(spaced("/mean"), spaced("/fused"), spaced("@", st.integers(1, 3).map(str))))
    fused = st.lists(ids, min_size=2, max_size=4).map("+".join)
    bracket = spaced("[", joined(st.one_of(ids, ids, parts, ranges(4), fused), 3), "]", form)
    item = st.one_of(
        spaced(st.one_of(ids, parts), repeat(4), scale),
        spaced(ranges(36), repeat(2), scale),
        spaced(bracket, repeat(2), scale),
    )
    for _ in range(2):
        item = st.one_of(item, spaced("(", joined(item, 2), ")", repeat(2), scale))
    return joined(item, 3)
