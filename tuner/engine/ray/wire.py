"""Messages between the tuner, its bridge process and the workers of nodes. All of them are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.devices import DeviceProfile
    from tuner.engine.base import CertifyJob, CompileJob, DeviceFacts, EvaluateJob, FinalJob

type Job = CompileJob | EvaluateJob | FinalJob | CertifyJob
type Method = Literal["compile", "evaluate", "final", "certify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One job for a node.

    method: of the engine
    profile: of the device that it is for
    job: as the tuner made it; module paths are those of the tuner's machine
    modules: bytes of modules that the node may lack, by sha256
    """

    method: Method
    profile: DeviceProfile
    job: Job
    modules: Mapping[str, bytes] = field(default_factory=dict)


class Ending(StrEnum):
    """How a call ended on its node."""

    VALUE = "value"  # with a reply about the candidate
    LOST = "lost"  # a worker of the node went away under it: another try may go through
    UNFIT = "unfit"  # the node cannot do it: no compiler, disk full, GPU gone
    MISSING = "missing"  # modules are not there: send them along


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a node says of a call.

    ending: how it ended
    value: the engine's reply, or for MISSING the hashes
    reason: for people, empty after success
    """

    ending: Ending
    value: Any = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What a node's worker tells of itself when it has started.

    name: for messages
    gpus: its live devices
    serves: name of the profile that each device name stands for; another one only for invented devices
    toolchain: its compilers in one line
    cuda: CUDA version of its compiler
    """

    name: str
    gpus: tuple[DeviceFacts, ...]
    serves: Mapping[str, str]
    toolchain: str
    cuda: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRow:
    """A live node as Ray lists it.

    node_id: Ray's, in hexadecimal
    address: of its machine
    resources: all that it offers
    labels: set when it was started
    is_head: whether the cluster's head runs there
    started_ms: when it joined
    """

    node_id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    is_head: bool
    started_ms: int


# ---------------------------------------------------------------------- tuner -> bridge


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """Ask a node's worker something.

    number: names the request
    node: id and resources of the node
    method: "describe", "health" or "run"
    call: for "run"
    """

    number: int
    node: NodeRow
    method: Literal["describe", "health", "run"]
    call: Call | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    """Nobody waits for this request any more."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """A node's worker does not answer: take a fresh one for the next request."""

    node_id: str


# ---------------------------------------------------------------------- bridge -> tuner


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The live nodes of the cluster; sent when they change."""

    rows: tuple[NodeRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replied:
    """The worker's answer to a request."""

    number: int
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A request that Ray could not carry out: its node or worker is gone, or cannot be reached."""

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The bridge cannot work at all; the message says why and what to do."""

    reason: str


type ToBridge = Submit | Cancel | Forget
type FromBridge = Nodes | Replied | Broken | Refused
