"""Nodes meet in preflight: nodes that do not arrive are left out, whatever the order of arrival."""

import threading
import time

import pytest
from support.runs import wait_until

from baton.slurm.bandwidth_checks import Meeting
from baton.slurm.errors import UnfitNode

PATIENCE_S = 30.0


class Clock:
    """Of the nodes: it goes on when the test says so, however long anything takes on this machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.002)


class Nodes:
    """Nodes of one attempt, each a thread. found: of each node that came, who it met, or why it did not."""

    def __init__(self, folder, clock) -> None:
        self.folder, self.clock = folder, clock
        self.found, self._threads = {}, []

    def come(self, node) -> None:
        """This one is there, and waits for the others."""

        def meet() -> None:
            try:
                self.found[node] = Meeting(self.folder, ["n1", "n2", "n3"], node, PATIENCE_S).members
            except UnfitNode as unfit:
                self.found[node] = str(unfit)

        self._threads.append(threading.Thread(target=meet, daemon=True))
        self._threads[-1].start()
        wait_until((self.folder / "preflight" / f"{node}.here").exists, f"{node}'s word that it is here")

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("baton.slurm.bandwidth_checks.time", clock)
    return Nodes(tmp_path, clock)


@pytest.mark.parametrize("arrivals", [("n1", "n3"), ("n3", "n1")])
def test_a_node_that_does_not_come_is_left_out(nodes, arrivals):
    for node in arrivals:
        nodes.come(node)
    nodes.clock.now = 1.1 * PATIENCE_S
    nodes.wait()
    assert nodes.found == {node: ["n1", "n3"] for node in arrivals}


def test_nobody_waits_when_all_are_there(nodes):
    all_of_them = ["n1", "n2", "n3"]
    for node in ("n2", "n3", "n1"):
        nodes.come(node)
    nodes.wait()
    assert nodes.found == dict.fromkeys(all_of_them, all_of_them)
    assert nodes.clock.now == 0.0


def test_who_comes_too_late_is_told(nodes):
    nodes.come("n2")
    nodes.come("n3")
    nodes.clock.now = 1.1 * PATIENCE_S
    nodes.wait()
    nodes.come("n1")
    nodes.wait()
    assert nodes.found == {"n1": "was too late for the checks between nodes", "n2": ["n2", "n3"], "n3": ["n2", "n3"]}


def test_a_node_that_promised_to_decide_and_then_says_nothing_is_named(nodes):
    """n1 was here, and its process died: the others neither wait for ever nor go on without knowing who is there."""
    (nodes.folder / "preflight").mkdir()
    (nodes.folder / "preflight" / "n1.here").touch()
    nodes.come("n2")
    nodes.clock.now = 2.1 * PATIENCE_S
    nodes.wait()
    assert nodes.found == {"n2": "n1 passed its own checks, and then did not respond"}
