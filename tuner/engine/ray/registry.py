"""The nodes that there are and were: asks them how they are, sets aside those that fail, says so to people."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tuner.engine.ray.cluster import reference_of
from tuner.engine.ray.nodes import Node
from tuner.engine.ray.plan import ours
from tuner.engine.ray.versions import SHARED, differences, of_labels
from tuner.engine.ray.wire import Broken, Cancel, Forget, NodeReport, Replied, Submit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tuner.engine.base import DeviceFacts
    from tuner.engine.ray.dispatch import Sender
    from tuner.engine.ray.wire import NodeRow

AT_ONCE_S = 0.5  # before a node that is new, or could not be reached, is asked again
log = logging.getLogger("gemm_tuner.ray")


@dataclass(frozen=True, slots=True)
class _Question:
    node_id: str
    method: Literal["describe", "health"]
    asked_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """A GPU of the cluster, as people see it.

    facts: of the device
    state: READY, SET_ASIDE or OFFLINE
    reason: for people, empty when READY
    """

    facts: DeviceFacts
    state: str
    reason: str = ""


class Registry:
    """Nodes by id. Not thread-safe: the dispatcher's lock is held by whoever calls."""

    def __init__(self, sender: Sender, versions: Mapping[str, str]) -> None:
        """`versions` are the tuner's own: a node must share those of SHARED with it."""
        self._sender = sender
        self._versions = versions
        self._nodes: dict[str, Node] = {}
        self._questions: dict[int, _Question] = {}
        # Health checks and jobs share one channel; these count down from -1, jobs up from 1.
        self._numbers = itertools.count(-1, -1)
        self._gone: dict[str, DeviceState] = {}
        self._aside: list[Node] = []

    @property
    def usable(self) -> list[Node]:
        """Those that jobs may be sent to."""
        return [node for node in self._nodes.values() if node.usable]

    def could_run(self, lane: str, *, but: Collection[str] = ()) -> bool:
        """Whether there is a node for jobs of this lane, be it full or asked how it is just now."""
        return any(node.counts and node.slots(lane) for node in self._nodes.values() if node.row.node_id not in but)

    def node(self, node_id: str) -> Node | None:
        """A node that is there."""
        return self._nodes.get(node_id)

    def reports(self) -> list[NodeReport]:
        """What the usable nodes say of themselves."""
        return [node.report for node in self.usable if node.report is not None]

    def devices(self) -> list[DeviceState]:
        """Every GPU that was ever seen. The same card under a node that came back is one."""
        found = dict(self._gone)
        for node in self._nodes.values():
            for facts in node.report.gpus if node.report else ():
                reason = f"node {node.name}: {node.aside}" if node.aside else ""
                found[facts.uuid] = DeviceState(facts=facts, state="SET_ASIDE" if reason else "READY", reason=reason)
        return [found[uuid] for uuid in sorted(found)]

    def troubles(self) -> str:
        """Why nodes cannot be used, in one line."""
        texts = [f"{node.name}: {node.aside or 'has not told what it offers'}" for node in self._nodes.values()]
        return "; ".join(texts) or "no node is in the cluster"

    # ------------------------------------------------------------------ coming and going

    def update(self, rows: Sequence[NodeRow]) -> list[Node]:
        """Take over the list of live nodes; returns those that are gone."""
        mine = {row.node_id: row for row in rows if ours(row.resources)}
        gone = [self._nodes.pop(node_id) for node_id in list(self._nodes) if node_id not in mine]
        for node in gone:
            log.warning("node %s is gone", node.name)
            self._remember(node, f"node {node.name} is gone")
        for node_id, row in mine.items():
            if node_id not in self._nodes:
                self._nodes[node_id] = node = Node(row)
                self._check_versions(node, rows)
        self._drop_questions_to(node.row.node_id for node in gone)
        return gone

    def cut(self, reason: str) -> None:
        """Nothing is known of any node until the list comes again."""
        for node in self._nodes.values():
            self._remember(node, f"the Ray cluster cannot be reached: {reason}")
        self._nodes.clear()
        self._questions.clear()

    def _remember(self, node: Node, reason: str) -> None:
        for facts in node.report.gpus if node.report else ():
            self._gone[facts.uuid] = DeviceState(facts=facts, state="OFFLINE", reason=reason)

    def _check_versions(self, node: Node, rows: Sequence[NodeRow]) -> None:
        """A node that does not fit is never used. `gemm-tuner node` refuses it as well, but it may be bypassed."""
        earlier = [row for row in rows[: rows.index(node.row)] if not self._differs(row)]
        reference, mine = reference_of(earlier), of_labels(node.row.labels)
        if not mine:
            node.put_aside_for_good("it was not started by gemm-tuner node")
        elif different := [*self._differs(node.row), *differences(reference, mine)]:
            node.put_aside_for_good("; ".join(dict.fromkeys(different)))
        if node.aside:
            log.warning("node %s is set aside: %s", node.name, node.aside)

    def _differs(self, row: NodeRow) -> list[str]:
        """From this tuner."""
        return differences(self._versions, of_labels(row.labels), names=SHARED)

    # ------------------------------------------------------------------ health

    def ask(self, now_s: float, every_s: float) -> None:
        """Send the health checks that are due; a node that is new is asked at once what it offers."""
        asked = {question.node_id for question in self._questions.values()}
        for node in self._nodes.values():
            fresh = not node.failures and (node.suspect or node.report is None)
            due = now_s - node.checked_s >= (AT_ONCE_S if fresh else every_s)
            if node.row.node_id in asked or not due:
                continue
            method: Literal["describe", "health"] = "health" if node.report else "describe"
            number = next(self._numbers)
            if self._sender.send(Submit(number=number, node=node.row, method=method)):
                node.checked_s = now_s
                self._questions[number] = _Question(node.row.node_id, method, now_s)

    def heard(self, message: Replied | Broken) -> None:
        """An answer to a health check; anything else is too late."""
        question = self._questions.pop(message.number, None)
        node = self._nodes.get(question.node_id) if question else None
        if node is None or question is None:
            return
        if isinstance(message, Broken):
            self._failed(node, message.reason)
        elif isinstance(message.value, NodeReport):
            node.report = message.value
            node.passed()
            for facts in node.report.gpus:
                self._gone.pop(facts.uuid, None)
        elif message.value:
            self._failed(node, str(message.value))
        elif node.passed():
            log.info("node %s is used again", node.name)

    def overdue(self, now_s: float, timeout_s: float) -> list[int]:
        """Questions that were not answered in time; each counts as a failed check. A worker may take long to start."""
        late = []
        for number, question in list(self._questions.items()):
            patience_s = timeout_s if question.method == "health" else 6 * timeout_s
            if now_s - question.asked_s > patience_s:
                late.append(number)
                del self._questions[number]
                if (node := self._nodes.get(question.node_id)) is not None:
                    self._failed(node, f"no answer within {patience_s:g} s")
        return late

    def note_aside(self, node: Node) -> None:
        """It was set aside for jobs that it could not do."""
        log.warning("node %s is set aside: %s", node.name, node.aside)
        self._aside.append(node)

    def newly_aside(self) -> list[Node]:
        """Nodes that were set aside since the last call."""
        aside, self._aside = self._aside, []
        return aside

    def _failed(self, node: Node, reason: str) -> None:
        self._sender.send(Forget(node_id=node.row.node_id))
        if node.failed(reason):
            self.note_aside(node)

    def _drop_questions_to(self, node_ids: Iterable[str]) -> None:
        gone = set(node_ids)
        for number in [number for number, question in self._questions.items() if question.node_id in gone]:
            del self._questions[number]
            self._sender.send(Cancel(number=number))
