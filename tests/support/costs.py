"""A pytest plugin that measures each test file's processor time and prints the ten dearest files when a run ends.

Processor time, in contrast to elapsed time, is nearly the same on a busy machine. It is the user and system time of the process
that runs the tests and of all its descendants. Daemons that have left the process tree (those of SLURM) are found by an environment
variable they inherit; what such a daemon spent is lost if it ends between two tests.
"""

import os
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

MARK = "BATON_TESTS"  # in the environment of everything the tests start: the id of the process that runs the tests
SHOWN = 10
SHORT_S = 0.2


def _spent_by(process: psutil.Process) -> float:
    """Seconds of processor time of a process and of its children that it has waited for; 0 if it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def _marked(mark: bytes) -> list[psutil.Process]:
    """Processes whose environment has ``mark``, this one excepted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(psutil.Process(int(folder.name)))
        except (OSError, psutil.Error):
            continue
    return found


def _spent(mark: bytes) -> float:
    """Seconds of processor time so far of this process and of everything it started."""
    return sum(map(_spent_by, [psutil.Process(), *_marked(mark)]))


class Costs:
    """Processor time by test file; with xdist, the workers' sums come to the controlling process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: Counter[str] = Counter()
        os.environ[MARK] = str(os.getpid())
        self.mark = f"{MARK}={os.getpid()}".encode()
        self.started = time.monotonic()
        self.last = _spent(self.mark)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):
        began = time.monotonic()
        result = yield
        # short tests of one file together: to look at all processes takes some milliseconds
        if nextitem is not None and nextitem.location[0] == item.location[0] and time.monotonic() - began < SHORT_S:
            return result
        now = _spent(self.mark)
        # a process that ended and was waited for by a parent outside the tree takes its time with it
        self.seconds[item.location[0]] += max(0.0, now - self.last)
        self.last = now
        return result

    # outermost, so that nothing is printed after it
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = dict(self.seconds)
        result = yield
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and self.seconds:
            self._report(reporter)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("costs", {}))

    def _report(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.seconds.values())
        terminalreporter.section(f"processor time: {total / 60:.1f} min in {(time.monotonic() - self.started) / 60:.1f} min")
        for name, seconds in self.seconds.most_common(SHOWN if terminalreporter.config.option.verbose < 1 else None):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config), "baton-costs")
