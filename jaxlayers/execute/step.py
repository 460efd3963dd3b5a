"""One step of a program by itself, for executors that decide on the host which layer runs next."""

import dataclasses

from jaxlayers.decoder.stack import Decoder
from jaxlayers.program import Program
from jaxlayers.program_text import Item


def isolate(decoder: Decoder, step: Item) -> tuple[Decoder, Program]:
    """Returns a decoder and a program that run one step of a program, a row or a Newton row.

    In the per-layer form the decoder holds the layers of the step alone, so that one compilation without a
    choice of layers serves every step of that shape. Stacked layers stay whole and are indexed.
    """
    if not isinstance(decoder.layers, tuple):
        return decoder, Program.of([step], decoder.config.layers)
    ids = sorted({layer for lane in step.lanes for layer, _ in lane})
    config = dataclasses.replace(
        decoder.config, layers=len(ids), windows=tuple(decoder.config.windows[i] for i in ids)
    )
    layers = tuple(decoder.layers[i] for i in ids)
    lanes = tuple(tuple((ids.index(layer), part) for layer, part in lane) for lane in step.lanes)
    return (
        dataclasses.replace(decoder, config=config, layers=layers),
        Program.of([step._replace(lanes=lanes)], len(ids)),
    )


def bucket(n: int, most: int | None = None, steps: int = 1) -> int:
    """Returns the least of few sizes that holds n, at most `most`, so that few are compiled.

    From one power of two to the next there are `steps`, itself a power of two: with 1 the sizes are 1, 2, 4,
    8 .., with 2 also 3, 6, 12 .., with 4 also 5, 7, 10, 14 ..; 0 is 0.
    """
    step = max(1, (1 << max(n.bit_length() - 1, 0)) // steps)
    size = -(-n // step) * step
    return size if most is None else min(size, most)
