"""What a decoder is before it has weights: sizes, norms, rotary embedding, windows."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) and how its frequencies are stretched.

    `kind` is `default`, `linear` (positions divided by `factor`) or `llama3` (Llama 3.1's frequency bands).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        if self.kind not in ("default", "linear", "llama3"):
            raise ValueError(f"RoPE type {self.kind!r} is not supported; use default, linear or llama3.")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_context"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"RoPE {name} must be a finite number above 0, not {value!r}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RoPE high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
                f"{self.low_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and choices of one decoder stack; hashable, so it can be a static argument of `jax.jit`.

    The letters are those used in shapes everywhere: V vocabulary, D model width, L layers, H query heads,
    K key-value heads, Q head width, F feed-forward width.
    """

    vocab: int  # V
    embed: int  # D
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_width: int  # Q
    ffw: int  # F
    context: int = 2048  # positions the model was made for
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    windows: tuple[
        int | None, ...
    ] = ()  # sliding window of each layer, None for full attention; () is all None
    tied: bool = False  # the head is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before RoPE
    family: str = "llama"  # names the checkpoint table in weights/

    def __post_init__(self):
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head_width", "ffw", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config {name} must be a whole number of at least 1, not {value!r}.")
        if self.heads % self.kv_heads:
            raise ValueError(f"config heads {self.heads} must be a multiple of kv_heads {self.kv_heads}.")
        if self.head_width % 2:
            raise ValueError(f"config head_width {self.head_width} must be even, because RoPE rotates pairs.")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ValueError(f"config norm_eps must be a finite number above 0, not {self.norm_eps!r}.")
        if len(self.windows) != self.layers:
            raise ValueError(f"config windows has {len(self.windows)} entries for {self.layers} layers.")
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"config windows {self.windows} must be None or at least 1.")

    @property
    def window_kinds(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of first use; a layer's window is an index into them."""
        return tuple(dict.fromkeys(self.windows))
