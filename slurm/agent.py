"""The agent of one node in an attempt: srun starts `python -m baton.slurm.agent RUN/attempts/NNNN` once on each node.

It starts the node's ranks, forwards signals to them, monitors heartbeats of ranks and nodes, and ends all ranks together. Agents
communicate by files in the attempt's folder and have no blocking calls to each other, so a hanging agent cannot make others hang:

    nodes/NAME       heartbeat of a node, written every two seconds: {count, time, ranks: {rank: beat}, stopped: [rank]}
    nodes/NAME.end   how the node's ranks ended: {status, reason, time, told, ranks: {rank: exit code}}
    rendezvous.json  address and port of rank 0
    stacks/rank-N    stack traces of each rank, written when a rank hangs
    ending           the verdict that ends the attempt, written by one agent: {status, reason, node, time, suspects, dead, stacks}.
                     Every agent dumps stacks if it says so, and ends its ranks
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from baton.launcher import bytecode
from baton.launcher.errors import BusyError, ConfigError, explained
from baton.launcher.liveness import LAST_WORDS_S, LOOK_S, Culprit, Watch, account, ask_stacks, is_stopped
from baton.launcher.processes import STOPPED, end_ranks, listen, log_of, misses_others, rank_environment, report, start_of, tell
from baton.launcher.ranks import Rank
from baton.launcher.run_directory import hold, read_config, write_whole
from baton.slurm.exits import Exit
from baton.slurm.liveness import Nodes
from baton.slurm.run_files import cluster_of, node_name, nodes_of

BEAT_S = 2.0
"""Seconds between two heartbeats of a node."""

MEETING_S = 120.0
"""Seconds to wait until rank 0's node has published its address."""

BUSY_S = 60.0
"""Seconds that the first node waits for another process to release the run. The other nodes wait longer, for MEETING_S."""


class Agent:
    """Starts and watches the ranks of one node. attempt: the attempt's folder, with config.yaml and nodes.txt."""

    def __init__(self, attempt: Path) -> None:
        self.attempt, self.run = attempt, attempt.parent.parent
        self.config, self.cluster = read_config(attempt / "config.yaml"), cluster_of(attempt.parent.parent)
        self.nodes, self.name = nodes_of(attempt), node_name()
        if self.name not in self.nodes:
            raise ConfigError(f"this node is {self.name}, and the attempt's nodes are {', '.join(self.nodes)}")
        self.index, world = self.nodes.index(self.name), self.config.layout.world_size
        self.count = world // len(self.nodes)
        self.first = self.index * self.count
        self.watch = Watch(self._numbers(), self.config.jobs.hang_timeout_s, self.config.jobs.startup_timeout_s)
        self.signals: list[int] = []
        self.told_at: float | None = None
        self.ranks: list[Rank] = []
        self.others = Nodes(attempt, self.nodes, self.index, self.config.jobs.node_timeout_s)
        self.beat_due, self.count_of_beats = 0.0, 0

    def work(self) -> int:
        """Runs until the node's ranks have ended. Returns the exit code for srun."""
        for folder in ("nodes", "stacks"):
            (self.attempt / folder).mkdir(exist_ok=True)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        try:
            with hold(self.run, BUSY_S) if self.index == 0 else contextlib.nullcontext():
                status, reason = self._start() or self._watch()
        except BusyError as busy:
            status, reason = self._end_all(Exit.BUSY, str(busy))
        finally:
            end_ranks(self.ranks)
            self.watch.close()
        self._say_end(status, reason)
        print(f"{self.name}: {reason}", flush=True)
        # srun kills the other agents when one returns non-zero, but agents that were told to stop must be able to finish
        return 0 if status == Exit.STOPPED else int(status)

    def _start(self) -> tuple[Exit, str] | None:
        """Starts the ranks. Returns a verdict if rank 0's node has not published its address."""
        if (met := self._meet()) is None:
            first = self.nodes[0]
            return self._end_all(Exit.NODE_LOST, f"node {first} did not publish its address within {MEETING_S:.0f} s", dead=first)
        address, port, listener = met
        world = self.config.layout.world_size
        environment = rank_environment(address, port, world, self.count) | self.watch.environment
        self.ranks = start_of(self.attempt, self._numbers(), environment, listener)
        if listener is not None:
            listener.close()
        return None

    def _meet(self) -> tuple[str, int, socket.socket | None] | None:
        """Address and port of rank 0 and, on its node, the listening socket that reserves the port; None: not published in time."""
        where, slurm = self.attempt / "rendezvous.json", self.cluster.slurm
        assert slurm is not None
        if self.index == 0:
            listener = listen("", slurm.ports)
            address, port = _address(slurm.interface) or self.name, listener.getsockname()[1]
            write_whole(where, json.dumps({"address": address, "port": port}))
            return address, port, listener
        deadline = time.monotonic() + MEETING_S
        while not where.exists():
            if time.monotonic() > deadline or (self.attempt / "ending").exists():
                return None
            time.sleep(LOOK_S)
        met = json.loads(where.read_text(encoding="utf-8"))
        return met["address"], met["port"], None

    def _watch(self) -> tuple[Exit, str]:
        while True:
            now = time.monotonic()
            self._hand_on_signals(now)
            running = {rank: p.pid for rank, p in zip(self._numbers(), self.ranks) if p.poll() is None}
            if len(running) < self.count and (ended := self._ended()):
                return ended
            self.watch.look(now, running)
            self._beat(now)
            if (verdict := self._verdict()) is not None:
                return verdict
            if self.told_at is not None and now - self.told_at > self._save_s():
                return self._end_all(Exit.SAVE_TOO_LONG, f"not done with saving {self._save_s():.0f} s after it was told to stop")
            if late := self.watch.late():
                return self._hung(late)
            if (lost := self.others.lost(now)) is not None:
                return self._lost(lost)
            time.sleep(LOOK_S)

    def _numbers(self) -> range:
        return range(self.first, self.first + self.count)

    def _save_s(self) -> float:
        assert self.cluster.slurm is not None
        return self.cluster.slurm.save_timeout_s

    def _hand_on_signals(self, now: float) -> None:
        if self.told_at is None and not self.signals and (self.run / "stop").exists():
            self.signals.append(signal.SIGUSR1)
        if self.signals and self.told_at is None:
            self.told_at = now
            print(f"{self.name}: {signal.Signals(self.signals[0]).name}: ranks end after this step", flush=True)
            tell(self.ranks, signal.SIGTERM)

    def _ended(self) -> tuple[Exit, str] | None:
        """The verdict of ranks that have ended; None: the others continue."""
        failed = {rank: p.returncode for rank, p in zip(self._numbers(), self.ranks) if p.returncode not in (None, 0)}
        if any(status != STOPPED for status in failed.values()):
            return self._failed()
        if any(p.returncode is None for p in self.ranks):
            return None
        if not failed:
            return Exit.DONE, "its ranks have done the last step"
        return Exit.STOPPED, "its ranks ended as told, and saved"

    def _failed(self) -> tuple[Exit, str]:
        if not any(p.returncode in (Exit.BAD_INPUT, Exit.STORAGE) for p in self.ranks):
            deadline = time.monotonic() + LAST_WORDS_S
            while any(p.poll() is None for p in self.ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
        failed = {rank: p.returncode for rank, p in zip(self._numbers(), self.ranks) if p.poll() not in (None, 0, STOPPED)}
        if all(code > 0 and misses_others(log_of(self.attempt, rank)) for rank, code in failed.items()):
            # these ranks only lost a connection, because ranks elsewhere ended first; their agent knows the cause
            deadline = time.monotonic() + self.config.jobs.node_timeout_s + 2 * BEAT_S
            while (now := time.monotonic()) < deadline:
                if (verdict := self._verdict()) is not None:
                    return verdict
                if (lost := self.others.lost(now)) is not None:
                    return self._lost(lost)
                self._beat(now)
                time.sleep(LOOK_S)
        status, sentence = report(failed, self.attempt, self._numbers())
        # a signal (a crash, the OOM killer) may be the node's fault; an exception is not
        suspects = [self.name] if any(code < 0 for code in failed.values()) else []
        return self._end_all(Exit(status), sentence, suspects=suspects)

    def _hung(self, late: dict[int, float]) -> tuple[Exit, str]:
        beats, stopped = self.others.beats()
        beats |= self.watch.beats()
        culprit = self.watch.culprit(late) if len(self.nodes) == 1 else Culprit.among(beats, stopped + self._stopped())
        node = None if culprit is None else self.nodes[culprit.rank // self.count]
        reason = account(culprit, late, beats, f" on {node}" if node else "")
        return self._end_all(Exit.HUNG, reason, suspects=[node] if node else [], stacks=True)

    def _lost(self, node: str) -> tuple[Exit, str]:
        seconds = self.config.jobs.node_timeout_s
        return self._end_all(Exit.NODE_LOST, f"node {node} gave no sign of life for {seconds:.0f} s", dead=node)

    def _end_all(
        self, status: Exit, reason: str, *, suspects: list[str] | None = None, dead: str | None = None, stacks: bool = False
    ) -> tuple[Exit, str]:
        """Publishes this agent's verdict unless another agent has published one, and returns the published one."""
        verdict = {"status": int(status), "reason": reason, "node": self.name, "time": time.time(), "suspects": suspects or [],
                   "dead": [dead] if dead else [], "stacks": stacks}  # fmt: skip
        aside = self.attempt / f".ending-{self.name}"
        aside.write_text(json.dumps(verdict), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(aside, self.attempt / "ending")
        aside.unlink()
        return self._verdict() or (status, reason)

    def _verdict(self) -> tuple[Exit, str] | None:
        """The published verdict, if any. Dumps the ranks' stacks first if the verdict asks for them."""
        try:
            verdict = json.loads((self.attempt / "ending").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if verdict["stacks"]:
            ask_stacks(dict(zip(self._numbers(), self.ranks)), self.attempt / "stacks")
        return Exit(verdict["status"]), verdict["reason"]

    def _beat(self, now: float) -> None:
        """Writes this node's heartbeat if it is due."""
        if now < self.beat_due:
            return
        self.beat_due, self.count_of_beats = now + BEAT_S, self.count_of_beats + 1
        ranks = {str(rank): vars(beat) for rank, beat in self.watch.beats().items()}
        alive = {"count": self.count_of_beats, "time": time.time(), "ranks": ranks, "stopped": self._stopped()}
        with contextlib.suppress(OSError):
            write_whole(self.attempt / "nodes" / self.name, json.dumps(alive))

    def _stopped(self) -> list[int]:
        return [rank for rank, p in zip(self._numbers(), self.ranks) if is_stopped(p.pid)]

    def _say_end(self, status: Exit, reason: str) -> None:
        codes = {str(rank): p.returncode for rank, p in zip(self._numbers(), self.ranks)}
        end = {"status": int(status), "reason": reason, "time": time.time(), "told": self.told_at is not None, "ranks": codes}
        with contextlib.suppress(OSError):
            write_whole(self.attempt / "nodes" / f"{self.name}.end", json.dumps(end))


def _address(interface: str | None) -> str | None:
    """This node's IPv4 address on a network interface; None without one. Raises ConfigError if the interface has no address."""
    if interface is None:
        return None
    import psutil

    for found in psutil.net_if_addrs().get(interface, []):
        if found.family.name == "AF_INET":
            return str(found.address)
    known = ", ".join(sorted(psutil.net_if_addrs()))
    raise ConfigError(f"slurm.interface={interface}: this node has no address on it; it has {known}")


def main() -> int:
    bytecode.keep()
    try:
        return Agent(Path(sys.argv[1])).work()
    except Exception as error:
        status, text = explained(error)
        if status is None:
            raise
        print(f"baton: {text}", file=sys.stderr, flush=True)
        return status


if __name__ == "__main__":
    sys.exit(main())
