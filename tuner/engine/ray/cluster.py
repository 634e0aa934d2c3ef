"""Looking at a cluster from outside: its nodes, what they offer, their labels.

Ray's client of the head's table is used for it: `ray.nodes()` would demand to join first, and a machine that does not
fit is to be refused before. It is Ray's own and may change with a version; nothing else here uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.engine.ray.versions import differences, of_labels
from tuner.engine.ray.wire import NodeRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALIVE = 0  # GcsNodeInfo.ALIVE
TIMEOUT_S = 5.0


class ClusterUnreachable(RuntimeError):
    """Nobody answers at the address of the head."""


class Cluster:
    """The head's table of nodes."""

    def __init__(self, address: str) -> None:
        """Raises ClusterUnreachable."""
        from ray import _raylet

        self._address = address
        try:
            self._client: Any = getattr(_raylet, "GcsClient")(address=address)  # noqa: B009  (compiled: no type knows it)
        except Exception as error:  # Ray raises several kinds here, some of them its own and undocumented
            raise ClusterUnreachable(f"no Ray head answers at {address}: {error}") from error

    def nodes(self) -> tuple[NodeRow, ...]:
        """The live nodes, oldest first. Raises ClusterUnreachable."""
        try:
            table = self._client.get_all_node_info(timeout=TIMEOUT_S)
        except Exception as error:  # as above
            raise ClusterUnreachable(f"the Ray head at {self._address} does not answer: {error}") from error
        rows = [_row(node_id.hex(), info) for node_id, info in table.items() if info.state == ALIVE]
        return tuple(sorted(rows, key=lambda row: (row.started_ms, row.node_id)))


def reference_of(rows: Sequence[NodeRow]) -> dict[str, str]:
    """What the cluster agreed on: the versions of its oldest node of ours, the driver of the oldest that has a GPU."""
    reference: dict[str, str] = {}
    for row in rows:
        for name, value in of_labels(row.labels).items():
            reference.setdefault(name, value)
    return reference


def mismatch(rows: Sequence[NodeRow], versions: Mapping[str, str]) -> list[str]:
    """How a machine with these versions differs from the cluster, for people; empty where it may join."""
    return differences(reference_of(rows), versions)


def _row(node_id: str, info: Any) -> NodeRow:
    return NodeRow(
        node_id=node_id,
        address=info.node_manager_address,
        resources=dict(info.resources_total),
        labels=dict(info.labels),
        is_head=bool(info.is_head_node),
        started_ms=int(info.start_time_ms),
    )
