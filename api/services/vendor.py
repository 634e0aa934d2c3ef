"""How a kernel compares with the vendor library, in words that nobody has to work out from a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

BASELINES = ("cublaslt_best", "torch")  # the better one first


def verdict(ratio: Mapping[str, Any] | None) -> str:
    """`slower than cublaslt_best: 0.966 of its speed (95 % interval 0.964 to 0.968)`, and so on.

    A ratio is baseline time over ours, {"median", "low", "high"}, or a bare number in results of an earlier version.
    """
    for baseline in BASELINES:
        if found := (ratio or {}).get(baseline):
            return _sentence(baseline, found)
    return "not compared with the vendor library"


def _sentence(baseline: str, ratio: Any) -> str:
    if not isinstance(ratio, dict):
        ratio = {"median": ratio, "low": ratio, "high": ratio}
    median, low, high = (float(ratio[name]) for name in ("median", "low", "high"))
    where = f"{median:.3f} of its speed (95 % interval {low:.3f} to {high:.3f})"
    if high < 1:
        return f"slower than {baseline}: {where}"
    if low > 1:
        return f"faster than {baseline}: {where}"
    return f"as fast as {baseline} within the noise: {where}"
