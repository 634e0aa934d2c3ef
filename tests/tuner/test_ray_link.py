"""The tuner's side of its bridge process, with bridges that die, refuse and stall. No Ray."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kernels.artifacts import ArtifactStore
from tuner.engine.ray.cache import ModuleCache
from tuner.engine.ray.link import Link, LinkOptions
from tuner.engine.ray.wire import Cancel, Nodes, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 30.0
# A bridge: tells its nodes, answers each message with the like, until a Cancel of 0 makes it die.
BRIDGE = """
import os, sys
from multiprocessing.connection import Connection
from tuner.engine.ray.wire import Nodes, Refused
pipe = Connection(int(sys.argv[1]))
if sys.argv[3] == "nobody:1":
    pipe.send(Refused(reason="no Ray head answers at nobody:1"))
    sys.exit(3)
pipe.send(Nodes(rows=()))
while True:
    message = pipe.recv()
    if message.number == 0:
        os._exit(1)
    pipe.send(message)
"""


class Notes:
    """What a dispatcher would hear."""

    def __init__(self) -> None:
        self.heard_: list[Any] = []
        self.cuts: list[str] = []

    def heard(self, message: Any) -> None:
        """See Listener."""
        self.heard_.append(message)

    def cut(self, reason: str) -> None:
        """See Listener."""
        self.cuts.append(reason)


def linked(address: str = "head:1") -> tuple[Link, Notes]:
    """A link with such a bridge, and what comes over it."""
    command = (sys.executable, "-c", BRIDGE)
    link, notes = Link(LinkOptions(address=address, command=command, first_pause_s=0.05)), Notes()
    link.open(notes)
    return link, notes


@pytest.fixture
def link_and_notes() -> Iterator[tuple[Link, Notes]]:
    """One that works."""
    link, notes = linked()
    yield link, notes
    link.close()


def wait_for(question: Callable[[], object]) -> None:
    """Until it holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_bridge_that_dies_is_started_again_and_says_anew_which_nodes_there_are(
    link_and_notes: tuple[Link, Notes],
) -> None:
    """Ray's driver may end its process at any moment."""
    link, notes = link_and_notes
    wait_for(lambda: Nodes(rows=()) in notes.heard_)
    assert link.send(Cancel(number=0))
    wait_for(lambda: notes.heard_.count(Nodes(rows=())) == 2)
    assert notes.cuts == ["the bridge to Ray ended with status 1"]
    assert link.restarts == 1


def test_messages_pass_both_ways_in_order_and_none_waits_for_a_full_pipe(link_and_notes: tuple[Link, Notes]) -> None:
    """Sending returns at once, however much is on its way."""
    link, notes = link_and_notes
    wait_for(lambda: notes.heard_)
    began_s = time.monotonic()
    for number in range(1, 5001):
        assert link.send(Cancel(number=number))
    assert time.monotonic() - began_s < WAIT_S
    wait_for(lambda: len(notes.heard_) == 5001)
    assert [message.number for message in notes.heard_[1:]] == list(range(1, 5001))


def test_head_that_is_not_there_is_tried_again_with_growing_pauses() -> None:
    """The reason is kept for people."""
    link, notes = linked("nobody:1")
    try:
        wait_for(lambda: len(notes.cuts) >= 3)
        assert set(notes.cuts) == {"no Ray head answers at nobody:1"}
        assert not any(isinstance(message, Refused) for message in notes.heard_)
    finally:
        link.close()


def test_closing_ends_the_bridge_at_once_also_within_a_pause() -> None:
    """Nothing stays behind."""
    link, notes = linked("nobody:1")
    wait_for(lambda: notes.cuts)
    began_s = time.monotonic()
    link.close()
    assert time.monotonic() - began_s < WAIT_S / 2
    assert not any(thread.name == "ray-link" and thread.is_alive() for thread in threading.enumerate())
    assert not link.send(Cancel(number=1))


def test_modules_of_a_node_are_stored_once_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Within its MiB; one that was just used may belong to a job that runs."""
    store = ArtifactStore(tmp_path)
    cache = ModuleCache(store, 1, in_use_s=10.0)
    data = [bytes([index]) * 400_000 for index in range(4)]
    hashes = [store.put(each) for each in data]
    for age_s, sha256 in zip((300, 200, 100, 0), hashes, strict=True):
        os.utime(store.path(sha256), (time.time() - age_s, time.time() - age_s))
    cache.path(hashes[0])  # used again
    assert cache.sweep() == 2
    assert cache.missing(hashes) == (hashes[1], hashes[2])
    cache.take({hashes[1]: data[1]})
    assert store.read(hashes[1]) == data[1]
    assert cache.try_disk() == ""
