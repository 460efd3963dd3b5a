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


def bucket(n: int, most: int) -> int:
    """Returns the least power of two that holds n, at most `most`: few sizes are compiled."""
    return min(1 << (n - 1).bit_length(), most)


def roomy(n: int) -> int:
    """Returns the least of 0, 1 .. 8, 10, 12, 14, 16, 20 .. that holds n: few sizes, a quarter spare."""
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step
