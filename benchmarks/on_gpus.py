"""Runs all benchmarks that need GPUs in parallel: one queue per GPU for those that need one GPU, then those that need more.

A job starts only if its usual duration is left of --seconds. A job that is still running at the end is asked to end and keeps the
rows that it has (report.py). Other load on the machine disturbs the measurements: compile beforehand (ahead.py, archive.py) and
leave the processors to the benchmarks.

    python benchmarks/on_gpus.py --seconds 540 [--archive kernels.tar.xz] [--only train,exchange] [--logs FOLDER] [--list]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ENDING_S = 10.0
"""Seconds for a job to end when it is asked to."""


@dataclass(frozen=True)
class Job:
    """A command, on `gpus` GPUs (0: all there are), that usually takes `seconds`; they end earlier if there is less to do."""

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int = 1


@dataclass(frozen=True)
class Done:
    """status: the command's; None: it was not begun. seconds: that it took."""

    job: Job
    status: int | None
    seconds: float

    def __str__(self) -> str:
        how = "not begun" if self.status is None else "done" if self.status == 0 else f"status {self.status}"
        return f"{self.job.name:<28} {how:<12} {self.seconds:6.0f} s of {self.job.seconds:.0f}"


def benchmark(name: str, program: str, words: str, seconds: float, gpus: int = 1) -> Job:
    return Job(name, (sys.executable, str(FOLDER / f"{program}.py"), *words.split()), seconds, gpus)


def train(name: str, words: str, seconds: float) -> Job:
    fixed = f"--warm-up 1 --steps 3 --seconds {seconds:.0f} --reserve 20"
    return benchmark(f"train_{name}", "train_step", f"{words} {fixed}", seconds)


JOBS = (
    train("gsa_8x2048", "--model gsa-1.3b --shapes 8x2048 --graphs", 240),
    train("gsa_bfloat16", "--model gsa-1.3b --shapes 8x2048 --graphs --residual-dtype bfloat16", 240),
    train("mamba_8x2048", "--model mamba-1.4b --shapes 8x2048 --graphs", 150),
    train("others_8x2048", "--model longhorn,transformer,bmojo --shapes 8x2048 --graphs --no-peers", 200),
    train("lattice_8x2048", "--model lattice-sim,lattice-enc,lattice-dec --shapes 8x2048 --graphs --no-peers", 240),
    train("gsa_profile", "--model gsa-1.3b --shapes 8x2048 --micro-batches 4 --profile --no-peers", 120),
    train("mamba_selective", "--model mamba-1.4b --shapes 8x2048 --selective --no-peers", 90),
    train("16384", "--model mamba-1.4b,gsa-1.3b,longhorn,bmojo,lattice-sim,transformer --shapes 1x16384 --no-peers", 360),
    train("131072", "--model mamba-1.4b,gsa-1.3b,longhorn,bmojo,transformer --shapes 1x131072 --no-peers", 360),
    *(
        benchmark(f"matrix_{name}", "matrix_gpu", f"--repetitions 20 --tokens 2048 --only {kinds}", seconds)
        for name, kinds, seconds in (
            ("lattice", "delta_net,lattice", 150),
            ("gsa", "gsa", 100),
            ("gla", "gla", 60),
            ("gated", "gated", 60),
            ("loop", "loop", 90),
        )
    ),
    benchmark("blocks", "blocks_gpu", "--repetitions 15", 200),
    benchmark("curves", "curves", "", 200),
    benchmark("generation", "generation_gpu", "", 300),
    benchmark("t2r", "t2r", "", 500),
    benchmark("needles", "needles", "", 400),
    benchmark("exchange", "exchange", "--repetitions 6 --warm-up 2", 100, gpus=0),
    benchmark("scaling", "scaling", "--warm-up 1 --steps 2 --reserve 30", 400, gpus=0),
)
"""Jobs in the order in which they start."""


class Run:
    """Runs jobs on GPUs until a deadline."""

    def __init__(self, gpus: int, seconds: float, logs: Path) -> None:
        self.gpus, self.logs = gpus, logs
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.done: list[Done] = []

    def left(self) -> float:
        return self._deadline - time.monotonic()

    def all(self, jobs: Iterable[Job]) -> list[Done]:
        """Those for one GPU from one queue, which every GPU takes from; then the others, one after the other."""
        alone, together = deque[Job](), list[Job]()
        for job in jobs:
            (alone if job.gpus == 1 else together).append(job)

        def take(gpu: int) -> None:
            while True:
                with self._lock:
                    if not alone:
                        return
                    job = alone.popleft()
                self.one(job, [gpu])

        workers = [threading.Thread(target=take, args=(gpu,)) for gpu in range(self.gpus)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for job in together:
            self.one(job, range(job.gpus or self.gpus))
        return self.done

    def one(self, job: Job, gpus: Sequence[int]) -> None:
        """Run it on these GPUs, if there are enough of them and of time."""
        status, began = None, time.monotonic()
        if len(gpus) <= self.gpus and (job.gpus == 1 or len(gpus) > 1) and self.left() >= job.seconds:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
            with (self.logs / f"{job.name}.log").open("wb") as log:
                process = subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                status = self._wait(process)
        found = Done(job, status, time.monotonic() - began)
        with self._lock:
            self.done.append(found)
        print(f"{found}, GPU {','.join(map(str, gpus))}, {self.left():.0f} s left", flush=True)

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        try:
            return process.wait(max(0.0, self.left()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def chosen(names: str) -> list[Job]:
    """The jobs whose names start with one of the words, in the order of the words; all jobs without words."""
    words = [word for word in names.split(",") if word]
    return [job for word in words for job in JOBS if job.name.startswith(word)] if words else list(JOBS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600, help="that there are (default 3600)")
    parser.add_argument(
        "--only", default="", help="names or their beginnings, separated by commas, in the order in which they begin"
    )
    parser.add_argument("--archive", type=Path, help="of kernels, to be unpacked into Triton's cache first")
    parser.add_argument("--logs", type=Path, help="keeps what the jobs print (default: a temporary folder)")
    parser.add_argument("--list", action="store_true", help="say what there is, and what it usually takes")
    arguments = parser.parse_args()
    jobs = chosen(arguments.only)
    if not jobs:
        parser.error(f"no job begins with any of {arguments.only!r}; known: {', '.join(job.name for job in JOBS)}")
    if arguments.list:
        print("\n".join(f"{job.name:<28} {job.gpus or 'all'} GPU, {job.seconds:.0f} s" for job in jobs))
        return
    import torch

    if not (gpus := torch.cuda.device_count()):
        parser.error("there is no GPU here")
    if arguments.archive is not None:
        from archive import unpack
        from triton import knobs

        print(f"{unpack(arguments.archive, Path(knobs.cache.dir))} kernels in {knobs.cache.dir}", flush=True)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    logs.mkdir(parents=True, exist_ok=True)
    done = Run(gpus, arguments.seconds, logs).all(jobs)
    print(f"logs: {logs}")
    sys.exit(any(one.status for one in done))


if __name__ == "__main__":
    main()
