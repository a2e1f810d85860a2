"""`baton experiment`: runs what is left of an experiment, within a time if one is given, and writes its page."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from baton.data_pipeline.errors import StorageError
from baton.launcher.devices import gpu_memory, kind_here
from baton.launcher.errors import ConfigError
from baton.launcher.experiments import report
from baton.launcher.experiments.cells import FOLDER, Device, Trial, chosen, trials
from baton.launcher.experiments.config import find, shipped
from baton.launcher.experiments.trainer import read_result, serve
from baton.launcher.inputs import check_inputs, with_known_vocabulary
from baton.launcher.planner import automatic
from baton.launcher.processes import STOPPED
from baton.launcher.run_directory import check_run, settled, source_state
from baton.training.monitoring.metrics import format_duration

PROCESS_BYTES = 9 << 30
"""GPU memory of a process beside what its run is planned to need: context, communicators, the libraries' and graphs' own. Measured
on an H100: 8.4 GiB for runs of two layers of width 64."""
SHARING = 8
"""Processes at most on one GPU, which takes turns with them."""


def overview() -> str:
    """A line for each shipped experiment."""
    return "\n".join(f"{name:<28} {find(name)[1].title}" for name in shipped())


def conduct(
    word: str,
    *,
    on: Literal["cpu", "gpu"] | None,
    budget_s: float | None,
    only: str | None,
    out: Path,
    processes: int | None,
    seeds: tuple[int, ...] | None,
) -> int:
    """Runs an experiment; returns the exit status: 0, 75 if the budget ended it, 1 if a run failed, 130 or 143 if a signal
    ended it.

    word: name of a shipped experiment, or path of a file. on: None: a GPU if there is one. budget_s: no run is begun after so many
    seconds. only: cells that are run. out: folder of the page. processes: that train at the same time; None: one a core, or one a
    GPU. seeds: None: the experiment's; others get runs and a page of their own. Raises ConfigError and other errors of settings.
    """
    name, experiment = find(word)
    device = _device(on)
    if seeds is not None and experiment.is_computed:
        raise ConfigError(f"--seeds: {name} is computed and not trained (measure={experiment.measure}); leave it out")
    made = trials(name, experiment, device, seeds)
    wanted = chosen(made, experiment, only)
    status = 0
    if not experiment.is_computed:
        for trial in wanted:
            check_run(settled(trial.config, device))
        left = [trial for trial in wanted if read_result(trial) is None]
        for trial in left:
            check_inputs(trial.config)
        print(f"{name}: {len(wanted)} runs, {len(wanted) - len(left)} finished before; in {FOLDER / name}", flush=True)
        if left:
            count = min(processes or process_count(left, device), len(left))
            status = _Conductor(left, device, count, budget_s).run()
        left = [trial for trial in left if read_result(trial) is None]
        if left:
            print(f"left: {len(left)} runs ({', '.join(trial.name for trial in left[:4])}{' ...' if len(left) > 4 else ''})")
    command = f"baton experiment {word}" + (" --on cpu" if device == "cpu" and not experiment.is_computed else "")
    for line in report.write(name, experiment, made, command, out):
        print(line)
    return status


def process_count(runs: Sequence[Trial], device: Device) -> int:
    """Processes that train at the same time: one a core, or on each GPU as many as its memory and the cores have room for."""
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        return cores
    gpus, memory = gpu_memory() or (1, 0)
    resolved = (automatic.resolve(with_known_vocabulary(trial.config), automatic.capacity_of(memory), "cuda")[0] for trial in runs)
    peaks = [automatic.planned_peak(settled(config, device)) for config in resolved]
    known = [peak for peak in peaks if peak is not None]
    fit = memory // (max(known) + PROCESS_BYTES) if len(known) == len(peaks) else 1
    return gpus * max(1, min(fit, cores // gpus, SHARING))


def _device(on: Literal["cpu", "gpu"] | None) -> Device:
    if on is None:
        return kind_here("auto")
    if on == "gpu" and kind_here("auto") != "cuda":
        raise ConfigError("--on gpu: no GPU that CUDA may use is here; leave it out, or --on cpu")
    return "cpu" if on == "cpu" else "cuda"


@dataclass
class _Trainer:
    process: Any
    connection: Connection
    trial: Trial | None = None
    since: float = 0.0


@dataclass
class _Conductor:
    """Trains runs in processes of their own."""

    left: list[Trial]
    device: Device
    processes: int
    budget_s: float | None
    trainers: list[_Trainer] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    failed: int = 0
    began: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        total, out_of_time = len(self.left), False
        waiting, done = list(self.left), 0
        with self._signals(), self._started():
            while True:
                out_of_time = self.budget_s is not None and time.monotonic() - self.began >= self.budget_s
                for trainer in self.trainers:
                    if trainer.trial is None and waiting and not (out_of_time or self.stopped or self.failed):
                        trainer.trial, trainer.since = waiting.pop(0), time.monotonic()
                        trainer.connection.send(trainer.trial)
                busy = {trainer.connection: trainer for trainer in self.trainers if trainer.trial is not None}
                if not busy:
                    break
                for connection in wait(list(busy), timeout=0.2):
                    done += self._ended(busy[connection], done + 1, total)  # type: ignore[index]
        if self.stopped:
            name = signal.Signals(self.stopped[0]).name
            print(f"baton: stopped by {name}; the runs are saved, and the same command goes on with them", file=sys.stderr)
            return 128 + self.stopped[0]
        if self.failed:
            return self.failed
        if waiting:
            print(f"the budget of {format_duration(self.budget_s or 0)} is used up; the same command goes on")
            return STOPPED
        return 0

    def _ended(self, trainer: _Trainer, done: int, total: int) -> bool:
        """Hears from a trainer; whether its run is finished. done: finished runs if this one is."""
        trial, trainer.trial = trainer.trial, None
        assert trial is not None
        try:
            status, said = trainer.connection.recv()
        except (EOFError, ConnectionResetError):  # reset: it ended before it had read which run it should train
            trainer.process.join()
            status, said = 1, f"its process ended with status {trainer.process.exitcode}"
        if status == 0:
            result = read_result(trial)
            row = None if result is None else result.row
            said = "diverged" if row is None else "  ".join(f"{key} {row[key]:.4f}" for key in ("loss", "accuracy") if key in row)
            now = time.monotonic()
            ahead = "" if done == total else f"  ETA {format_duration((now - self.began) / done * (total - done))}"
            print(f"{done} of {total}  {trial.name}  {said}  {format_duration(now - trainer.since)}{ahead}", flush=True)
        elif status != STOPPED:
            self.failed = status if status in (ConfigError.exit_status, StorageError.exit_status) else 1
            print(f"baton: {trial.config.folder}: {said}; start the same command to go on", file=sys.stderr)
        return status == 0

    @contextmanager
    def _started(self) -> Iterator[None]:
        """The trainers, forked from this process, which imports for them."""
        from baton.launcher.worker import import_for

        source_state()  # of now: the trainers have what is imported here
        import_for(self.device)
        _import_mixers(self.left)
        fork = multiprocessing.get_context("fork")
        for number in range(self.processes):
            ours, theirs = fork.Pipe()
            # a trainer must not keep the others' ends open: they would not see them closed
            others = [trainer.connection for trainer in self.trainers] + [ours]
            process = fork.Process(target=_serve, args=(theirs, others, self.device, number, self.processes, os.getpid()))
            process.start()
            theirs.close()
            self.trainers.append(_Trainer(process, ours))
        try:
            yield
        finally:
            for trainer in self.trainers:
                trainer.connection.close()
            for trainer in self.trainers:
                trainer.process.join()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Passes a request to stop on to the trainers, which save and end."""

        def stop(number: int, frame: Any) -> None:
            self.stopped.append(number)
            for trainer in self.trainers:
                if trainer.process.is_alive():
                    os.kill(trainer.process.pid, signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _import_mixers(left: list[Trial]) -> None:
    from baton.models.mixer import import_mixer

    for trial in left:
        for mixer in trial.config.model.mixers.values():
            import_mixer(mixer)


def _serve(connection: Connection, others: list[Connection], *arguments: Any) -> None:
    for other in others:
        other.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = 1
    try:
        serve(connection, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()  # nobody else does: the process ends below
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the interpreter's own end, with all that torch has imported, takes seconds
