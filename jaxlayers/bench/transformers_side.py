"""The same weights in transformers, the other side of the benchmarks."""

import tempfile
from pathlib import Path
from typing import Any

from jaxlayers.decoder.stack import Decoder
from jaxlayers.weights.export import export

THREADS = 2


def transformers_model(decoder: Decoder) -> Any:
    """Returns the decoder as a float32 transformers model on the CPU with `THREADS` threads.

    Raises ValueError in one sentence where torch or transformers is missing.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(
            f"this benchmark compares with transformers, and {error.name} is missing; "
            'install it with pip install "jaxlayers[parity]".'
        ) from error
    torch.set_num_threads(THREADS)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        export(decoder, None, Path(folder) / "model")
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    return model.eval()
