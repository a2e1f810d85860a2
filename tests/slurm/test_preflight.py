"""Nodes that meet in preflight: whoever does not come is left out, in whatever order the others do."""

import threading
import time

import pytest

from baton.slurm.preflight import Unfit
from baton.slurm.rates import Meeting


def meet(tmp_path, arrivals, *, patience):
    """Of each node that comes, so many seconds after the first: who it met, or why it did not."""
    found = {}

    def come(node, after):
        time.sleep(after)
        try:
            found[node] = Meeting(tmp_path, ["n1", "n2", "n3"], node, patience).members
        except Unfit as unfit:
            found[node] = str(unfit)

    threads = [threading.Thread(target=come, args=arrival) for arrival in arrivals.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("arrivals", [{"n1": 0.0, "n3": 0.9}, {"n1": 0.9, "n3": 0.0}])
def test_a_node_that_does_not_come_is_left_out(tmp_path, arrivals):
    assert meet(tmp_path, arrivals, patience=1.5) == {node: ["n1", "n3"] for node in arrivals}


def test_nobody_waits_when_all_are_there(tmp_path):
    began, all_of_them = time.monotonic(), ["n1", "n2", "n3"]
    assert meet(tmp_path, {"n1": 0.3, "n2": 0.0, "n3": 0.1}, patience=20) == dict.fromkeys(all_of_them, all_of_them)
    assert time.monotonic() - began < 15


def test_who_comes_too_late_is_told(tmp_path):
    found = meet(tmp_path, {"n1": 4.0, "n2": 0.0, "n3": 0.0}, patience=1.0)
    assert found == {"n1": "came too late for the checks between nodes", "n2": ["n2", "n3"], "n3": ["n2", "n3"]}
