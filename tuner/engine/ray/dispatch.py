"""Which node gets which job, and what becomes of jobs whose node is lost.

A job is sent to one node at a time. Lost there, its future raises WorkerLost, as with the `local` engine: the loop
tries the trial again under its number, at most twice, and here it goes to another node where there is one. An answer
that comes after that finds no request and is dropped. When the bridge is cut, or the head is lost, nobody's fault made
the jobs end: they are sent again without being counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kernels.artifacts import ArtifactError
from tuner.engine.base import EngineError, ModuleChanged, WorkerLost
from tuner.engine.ray.nodes import COMPILE
from tuner.engine.ray.wire import Answer, Broken, Call, Cancel, Ending, Nodes, Replied, Submit
from tuner.engine.ray.work import Ticket, modules_of, work_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from kernels.artifacts import ArtifactStore
    from kernels.devices import DeviceProfile
    from tuner.engine.ray.nodes import Node
    from tuner.engine.ray.registry import Registry
    from tuner.engine.ray.wire import FromBridge, Job, Method, ToBridge

log = logging.getLogger("gemm_tuner.ray")
REMEMBERED_LOSSES = 2048


class Sender(Protocol):
    """The way to the bridge, as `tuner.engine.ray.link.Link`."""

    def send(self, message: ToBridge) -> bool:
        """False when there is no bridge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchOptions:
    """When patience is over.

    limits_s: seconds after which a job counts as lost on its node, by method. The node's own limits end a job that
        hangs much earlier; these are for a node that does not keep them
    no_node_s: seconds that jobs wait while no node could run them
    tick_s: seconds between looks at clocks
    health_every_s, health_timeout_s: health checks
    """

    limits_s: dict[str, float] = field(
        default_factory=lambda: {"compile": 600.0, "evaluate": 1800.0, "final": 3600.0, "certify": 5400.0}
    )
    no_node_s: float = 900.0
    tick_s: float = 0.5
    health_every_s: float = 5.0
    health_timeout_s: float = 10.0


@dataclass(slots=True)
class _Sent:
    """A job that a node is at work on."""

    ticket: Ticket
    node_id: str
    sent_s: float


class Dispatcher:
    """Queues by lane: one for compiles, one for each device name. Thread-safe."""

    def __init__(
        self,
        sender: Sender,
        artifacts: ArtifactStore,
        registry: Registry,
        options: DispatchOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender, self._artifacts = sender, artifacts
        self._registry = registry
        self._options = options or DispatchOptions()
        self._clock = clock
        self._numbers = itertools.count(1)
        self._queues: dict[str, deque[Ticket]] = {}
        self._served_s: dict[str, float] = {}  # when a lane last had a node
        self._sent: dict[int, _Sent] = {}
        self._lost_at: OrderedDict[tuple[str, ...], set[str]] = OrderedDict()
        self._lock = threading.RLock()
        self.retries = 0

    # ------------------------------------------------------------------ what engines ask

    def submit(self, method: Method, profile: DeviceProfile, job: Job) -> Future[Any]:
        """Queue a job. Its future raises WorkerLost or EngineError."""
        lane = COMPILE if method == "compile" else profile.name
        ticket = Ticket(method, profile, job, lane)
        with self._lock:
            queue = self._queues.setdefault(lane, deque())
            # What ends a study goes before candidates; a study has one such job for all of its candidates.
            place = sum(waiting.is_urgent for waiting in queue) if ticket.is_urgent else len(queue)
            queue.insert(place, ticket)
            self._served_s.setdefault(lane, self._clock())
            self._pump(lane)
        return ticket

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """Nobody waits for these any more: take queued ones back, end running ones."""
        with self._lock:
            for future in futures:
                future.cancel()
                if isinstance(future, Ticket) and future.number in self._sent:
                    self._end(future.number)
                    self._sender.send(Cancel(number=future.number))
            self._pump_all()

    def locked(self) -> threading.RLock:
        """Hold it to look at the registry."""
        return self._lock

    @property
    def waiting(self) -> int:
        """Jobs that are queued here."""
        with self._lock:
            return sum(not ticket.done() for queue in self._queues.values() for ticket in queue)

    # ------------------------------------------------------------------ what the link tells

    def heard(self, message: FromBridge) -> None:
        """See Listener."""
        with self._lock:
            match message:
                case Nodes():
                    for gone in self._registry.update(message.rows):
                        self._lose_all_of(gone.row.node_id, f"node {gone.name} is gone")
                case Replied() if message.number in self._sent:
                    self._answered(message.number, message.value)
                case Broken() if message.number in self._sent:
                    if (node := self._registry.node(self._sent[message.number].node_id)) is not None:
                        node.suspect = True
                    self._lose(message.number, f"node {self._name_of(message.number)}: {message.reason}")
                case Replied() | Broken():
                    self._registry.heard(message)  # a health check, or too late
            self._registry.ask(self._clock(), self._options.health_every_s)
            self._pump_all()

    def cut(self, reason: str) -> None:
        """See Listener. What was running is queued again, first in line."""
        with self._lock:
            log.warning("%d jobs wait for Ray again: %s", len(self._sent), reason)
            for number in sorted(self._sent, reverse=True):
                ticket = self._end(number)
                if not ticket.done():
                    self._queues[ticket.lane].appendleft(ticket)
            self._registry.cut(reason)

    def tick(self) -> None:
        """Look at the clocks: jobs over their limit, health checks without an answer, lanes without a node."""
        now_s = self._clock()
        with self._lock:
            for number, sent in list(self._sent.items()):
                limit_s = self._options.limits_s[sent.ticket.method]
                if now_s - sent.sent_s > limit_s:
                    self._sender.send(Cancel(number=number))
                    self._lose(number, f"node {self._name_of(number)} did not answer within {limit_s:g} s")
            for overdue in self._registry.overdue(now_s, self._options.health_timeout_s):
                self._sender.send(Cancel(number=overdue))
            for node in self._registry.newly_aside():
                self._lose_all_of(node.row.node_id, f"node {node.name} was set aside: {node.aside}", cancel=True)
            self._registry.ask(now_s, self._options.health_every_s)
            self._give_up_lanes(now_s)
            self._pump_all()

    # ------------------------------------------------------------------ sending

    def _pump_all(self) -> None:
        for lane in self._queues:
            self._pump(lane)

    def _pump(self, lane: str) -> None:
        """Send what there is room for. One that may only go to a node that is full lets others pass."""
        queue, kept = self._queues[lane], []
        while queue:
            nodes = [node for node in self._registry.usable if node.room(lane) > 0]
            if not nodes:
                break
            ticket = queue.popleft()
            if ticket.done():
                continue
            node = self._choose(ticket, nodes)
            if node is None:
                kept.append(ticket)
            else:
                self._send(ticket, node)
        queue.extendleft(reversed(kept))

    def _choose(self, ticket: Ticket, nodes: list[Node]) -> Node | None:
        """The least loaded one; not where the job was lost before, unless there is no other."""
        lost_at = self._lost_at.get(work_key(ticket), set())
        fresh = [node for node in nodes if node.row.node_id not in lost_at]
        if not fresh:
            if self._registry.could_run(ticket.lane, but=lost_at):
                return None
            fresh = nodes
        return min(fresh, key=lambda node: (node.load(ticket.lane), node.row.node_id))

    def _send(self, ticket: Ticket, node: Node) -> None:
        try:
            wanted = [sha256 for sha256 in modules_of(ticket.job) if not node.has(sha256)]
            modules = {sha256: self._artifacts.read(sha256) for sha256 in wanted}
        except ArtifactError as error:
            ticket.fail(ModuleChanged(str(error)))
            return
        ticket.number = next(self._numbers)
        call = Call(method=ticket.method, profile=ticket.profile, job=ticket.job, modules=modules)
        self._sent[ticket.number] = _Sent(ticket, node.row.node_id, self._clock())
        node.begin(ticket.lane)
        node.note_modules(wanted)
        self._sender.send(Submit(number=ticket.number, node=node.row, method="run", call=call))

    # ------------------------------------------------------------------ answers and losses

    def _answered(self, number: int, answer: Answer) -> None:
        node = self._registry.node(self._sent[number].node_id)
        match answer.ending:
            case Ending.VALUE:
                ticket = self._end(number)
                if node is not None:
                    node.unfit = 0
                    if (kernel := getattr(answer.value, "kernel", None)) is not None:
                        node.note_modules([kernel.sha256])
                self._lost_at.pop(work_key(ticket), None)
                ticket.succeed(answer.value)
            case Ending.MISSING:
                ticket = self._end(number)
                if node is not None:
                    node.forget_modules(answer.value)
                    if not ticket.done():
                        self._send(ticket, node)
            case Ending.LOST:
                self._lose(number, answer.reason)
            case Ending.UNFIT:
                self._unfit(number, node, answer.reason)

    def _unfit(self, number: int, node: Node | None, reason: str) -> None:
        """The node's trouble where another one could do it, else the study's."""
        lane = self._sent[number].ticket.lane
        if node is not None and node.refused_job(reason):
            log.warning("node %s is set aside: %s", node.name, node.aside)
        if self._registry.could_run(lane, but=[node.row.node_id] if node is not None else []):
            self._lose(number, reason)
        else:
            self._end(number).fail(
                EngineError(f"{reason}; no other node could do it: repair it, then resume the study")
            )

    def _lose(self, number: int, reason: str) -> None:
        node_id = self._sent[number].node_id
        ticket = self._end(number)
        key = work_key(ticket)
        self._lost_at.setdefault(key, set()).add(node_id)
        self._lost_at.move_to_end(key)
        while len(self._lost_at) > REMEMBERED_LOSSES:
            self._lost_at.popitem(last=False)
        self.retries += 1
        ticket.fail(WorkerLost(reason))

    def _lose_all_of(self, node_id: str, reason: str, *, cancel: bool = False) -> None:
        for number in [number for number, sent in self._sent.items() if sent.node_id == node_id]:
            if cancel:
                self._sender.send(Cancel(number=number))
            self._lose(number, reason)

    def _end(self, number: int) -> Ticket:
        sent = self._sent.pop(number)
        if (node := self._registry.node(sent.node_id)) is not None:
            node.end(sent.ticket.lane)
        return sent.ticket

    def _name_of(self, number: int) -> str:
        node = self._registry.node(self._sent[number].node_id)
        return node.name if node is not None else self._sent[number].node_id[:8]

    def _give_up_lanes(self, now_s: float) -> None:
        for lane, queue in self._queues.items():
            if not queue or self._registry.could_run(lane):
                self._served_s[lane] = now_s
            elif now_s - self._served_s[lane] > self._options.no_node_s:
                what = "compiles" if lane == COMPILE else f"has a {lane}"
                text = f"for {self._options.no_node_s:g} s there was no node that {what}: {self._registry.troubles()}"
                while queue:
                    queue.popleft().fail(EngineError(text))
