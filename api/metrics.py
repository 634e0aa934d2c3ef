"""Counters in the text exposition format of Prometheus, written by hand: a handful needs no client library."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# GET /v1/best is meant to answer in milliseconds, an export listing may take longer.
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)

Labels = tuple[tuple[str, str], ...]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _sample(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inner}}} {value:g}" if inner else f"{name} {value:g}"


def family(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> list[str]:
    """Lines of one metric: help, type, then one line a label set."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    return lines + [_sample(name, labels, value) for labels, value in samples]


def by_state(name: str, text: str, counts: Mapping[str, int]) -> list[str]:
    """A gauge with one sample a state."""
    return family(name, "gauge", text, [((("state", state),), count) for state, count in sorted(counts.items())])


class RequestMetrics:
    """Requests of this process by method, route and status, and how long they took. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[Labels, int] = {}
        self._buckets = [0] * len(LATENCY_BUCKETS_S)
        self._count = 0
        self._sum_s = 0.0

    def observe(self, *, method: str, route: str, status: int, duration_s: float) -> None:
        """Count one finished request. `route` is the template (`/v1/jobs/{job_id}`), never the path that was asked."""
        labels = (("method", method), ("route", route), ("status", str(status)))
        with self._lock:
            self._requests[labels] = self._requests.get(labels, 0) + 1
            self._count += 1
            self._sum_s += duration_s
            for index, limit_s in enumerate(LATENCY_BUCKETS_S):
                if duration_s <= limit_s:
                    self._buckets[index] += 1

    def lines(self) -> list[str]:
        """Both metrics as exposition lines."""
        with self._lock:
            requests, buckets = sorted(self._requests.items()), tuple(self._buckets)
            count, sum_s = self._count, self._sum_s
        name = "gemm_tuner_http_request_duration_seconds"
        histogram: list[tuple[str, Labels, float]] = [
            (f"{name}_bucket", (("le", f"{limit_s:g}"),), hits)
            for limit_s, hits in zip(LATENCY_BUCKETS_S, buckets, strict=True)
        ]
        histogram += [
            (f"{name}_bucket", (("le", "+Inf"),), count),
            (f"{name}_sum", (), sum_s),
            (f"{name}_count", (), count),
        ]
        return [
            *family("gemm_tuner_http_requests_total", "counter", "Finished requests.", requests),
            f"# HELP {name} Time to the end of the response, event streams left out.",
            f"# TYPE {name} histogram",
            *(_sample(*line) for line in histogram),
        ]
