"""Shapes of known models, as the linear layers of a decoder block ask for them.

From the published `config.json` of each model: hidden size, heads, intermediate size. M is the number of tokens at a
time. With T GPUs and tensor parallelism the first product of a pair is cut along N, the second along K.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHAPES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One weight matrix.

    name: what it does
    n, k: its rows and columns on one GPU
    cut: side that tensor parallelism cuts: "n", "k" or "" for neither
    """

    name: str
    n: int
    k: int
    cut: str = ""

    def on(self, gpus: int) -> tuple[int, int] | None:
        """N and K of one GPU's part; None where they cannot be cut so."""
        extents = {"n": self.n, "k": self.k}
        if self.cut:
            if extents[self.cut] % gpus:
                return None
            extents[self.cut] //= gpus
        return None if extents["k"] % 8 else (extents["n"], extents["k"])


def _block(hidden: int, heads: int, kv_heads: int, head: int, intermediate: int) -> tuple[Linear, ...]:
    """Attention with grouped queries and a gated feed-forward."""
    return (
        Linear(name="qkv", n=(heads + 2 * kv_heads) * head, k=hidden, cut="n"),
        Linear(name="attention output", n=hidden, k=heads * head, cut="k"),
        Linear(name="gate and up", n=2 * intermediate, k=hidden, cut="n"),
        Linear(name="down", n=hidden, k=intermediate, cut="k"),
    )


MODELS: dict[str, tuple[Linear, ...]] = {
    "Llama 3.1 8B": _block(hidden=4096, heads=32, kv_heads=8, head=128, intermediate=14336),
    "Llama 3.1 70B": _block(hidden=8192, heads=64, kv_heads=8, head=128, intermediate=28672),
    "Qwen 2.5 7B": _block(hidden=3584, heads=28, kv_heads=4, head=128, intermediate=18944),
    "Qwen 3 8B": _block(hidden=4096, heads=32, kv_heads=8, head=128, intermediate=12288),
    "gpt-oss attention": _block(hidden=2880, heads=64, kv_heads=8, head=64, intermediate=2880)[:2],
    "DeepSeek V3": (
        Linear(name="query and key-value down-projection", n=1536 + 512 + 64, k=7168),
        Linear(name="query up-projection", n=128 * (128 + 64), k=1536, cut="n"),
        Linear(name="key-value up-projection", n=128 * (128 + 128), k=512, cut="n"),
        Linear(name="attention output", n=7168, k=128 * 128, cut="k"),
        Linear(name="shared expert, gate and up", n=2 * 2048, k=7168, cut="n"),
        Linear(name="shared expert, down", n=7168, k=2048, cut="k"),
        Linear(name="router", n=256, k=7168),
    ),
    "Squares": tuple(Linear(name="square", n=side, k=side) for side in (1024, 2048, 4096, 8192)),
}
TOKENS = "1, 16, 64, 256, 1024, 4096"
GPUS = (1, 2, 4, 8)


def shapes_of(model: str, tokens: list[int], gpus: int) -> list[tuple[int, int, int]]:
    """M, N and K of every layer and number of tokens, each once, at most MOST_SHAPES."""
    parts = [part for linear in MODELS.get(model, ()) if (part := linear.on(gpus))]
    found = dict.fromkeys((m, n, k) for n, k in parts for m in tokens)
    return list(found)[:MOST_SHAPES]
