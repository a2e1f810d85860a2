"""How long commands take to start: from `baton train` to the first step, and which packages each process imports at what cost.

The model has 0.6 million parameters, so nearly all of the time is start-up. Elapsed time is what a user waits, on a machine that
does nothing else. Processor time is the sum over all processes of the run until the first step, on which other programs have less
influence. Of several runs the least counts, since other programs only add to it. `cold` runs have empty caches of bytecode and of
kernels; `warm` runs are those after one run that has filled them.
`--before FILE` compares with the rows of an earlier run of this program, such as one of an earlier commit on the same machine.

    python benchmarks/startup.py [--ranks 1,2] [--repetitions 3] [--cold] [--before FILE]
"""

import argparse
import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import Report, load

BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
HEAVY = ("deepspeed", "fla", "matplotlib", "megatron", "sympy", "tensorboard", "torch", "transformers", "triton")
PARTS_OF_TORCH = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor")
STEPS = 3
RUN = """
name: startup
model: {d_model: 128, n_layers: 5, pattern: [mamba], mixers: {mamba: {d_state: 16}}}
data: {kind: mqar, length: 64, pairs: 4, vocab_size: 64, cases: []}
training:
  sequence_length: 128
  global_batch_tokens: 1024
  micro_batch_size: 2
  log_every: 1
  optimizer: {lr: 1.0e-3}
  evaluation: {every: 0}
"""


@dataclass(frozen=True)
class Start:
    """Seconds to the first step: elapsed, and of all processes together."""

    elapsed_s: float
    processor_s: float


def first_step(folder: Path, words: Iterable[str], environment: Mapping[str, str]) -> Start:
    """Until the first step is shown; the run then makes its others, and must end well."""
    began = time.monotonic()
    command = [*BATON, "train", str(folder.parent / "run.yaml"), f"directory={folder}", f"training.steps={STEPS}", *words]
    process = psutil.Popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = folder / "attempts" / "0001" / "rank-0.log"
    while not (log.exists() and "step 1/" in log.read_text(errors="replace")):
        if process.poll() is not None:
            sys.exit(f"the run ended before its first step:\n{process.stdout.read()}")
        time.sleep(0.01)
    found = Start(time.monotonic() - began, _processor_s(process))
    said, _ = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"the run ended with status {process.returncode}:\n{said}")
    return found


def _processor_s(process: psutil.Process) -> float:
    """Of a process and all that came of it, those that have ended included."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def seconds_of(command: list[str], repetitions: int) -> Start:
    """Of a short command."""
    found = []
    for _ in range(repetitions):
        began, before = time.monotonic(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        spent = after.children_user - before.children_user + after.children_system - before.children_system
        found.append(Start(time.monotonic() - began, spent))
    return best(found)


def best(found: Iterable[Start]) -> Start:
    """The least of each: what other programs do only adds."""
    elapsed, processor = zip(*((start.elapsed_s, start.processor_s) for start in found), strict=True)
    return Start(min(elapsed), min(processor))


IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$")


def imports_of(text: str) -> dict[str, float]:
    """Seconds of each package's own modules, and of some parts of torch, from what `-X importtime` writes."""
    found: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := IMPORTED.match(line):
            seconds, module = int(match[1]) / 1e6, match[2]
            part = next((part for part in PARTS_OF_TORCH if module == part or module.startswith(f"{part}.")), None)
            found[part or module.partition(".")[0]] += seconds
    return found


def imports_table(report: Report, title: str, text: str, most: int = 12) -> dict[str, float]:
    found = imports_of(text)
    modules = sum(bool(IMPORTED.match(line)) for line in text.splitlines())
    largest = sorted(found.items(), key=lambda item: -item[1])[:most]
    parts = ", ".join(f"{package} {seconds:.2f}" for package, seconds in largest if seconds >= 0.01)
    report.say(f"imports of {title}: {modules} modules, {sum(found.values()):.2f} s: {parts}")
    absent = [name for name in (*HEAVY, *PARTS_OF_TORCH) if name not in found]
    report.say(f"  not imported: {', '.join(absent) or 'none of those that are dear'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="time a run with empty caches too")
    parser.add_argument("--before", type=Path, help="results of an earlier run, to compare with")
    parser.add_argument("words", nargs="*", help="settings of the run, as device=cpu")
    arguments = parser.parse_args()
    before = load(arguments.before) if arguments.before else []
    earlier = {(row["case"], row["metric"]): row["ours"] for row in before}
    peer = f"before ({before[0]['commit'][:7]})" if before else "itself"
    report = Report("startup")
    report.say(f"load of this machine: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")

    def rows(case: str, start: Start, gate: str) -> None:
        for metric, value in (("elapsed s", start.elapsed_s), ("processor s", start.processor_s)):
            report.row(case, metric, value, peer, earlier.get((case, metric), value), gate=gate, higher_is_better=False)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "run.yaml").write_text(RUN)
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "kernels")}
        runs = (folder / f"run-{number}" for number in itertools.count())
        for ranks in map(int, arguments.ranks.split(",")):
            case = f"baton train, {ranks} rank{'s' if ranks > 1 else ''}"
            words = [f"layout.data={ranks}", *arguments.words]
            if arguments.cold:
                places = {"PYTHONPYCACHEPREFIX": f"bytecode-{ranks}", "TRITON_CACHE_DIR": f"kernels-{ranks}"}
                empty = environment | {name: str(folder / place) for name, place in places.items()}
                start = first_step(next(runs), words, empty)
                report.gate(f"{case}, cold", True, f"the run made its {STEPS} steps and ended well")
                rows(f"{case}, cold", start, f"{case}, cold")
            # the first one fills the caches
            _, *warm = [first_step(next(runs), words, environment) for _ in range(arguments.repetitions + 1)]
            report.gate(case, True, f"every run made its {STEPS} steps and ended well")
            rows(f"{case}, warm", best(warm), case)
        report.gate("commands", True, "every command ended with status 0")
        run = str(folder / "run.yaml")
        commands = {
            "baton --help": [*BATON, "--help"],
            "baton plan": [*BATON, "plan", run, "training.steps=3"],
        }
        for case, command in commands.items():
            rows(case, seconds_of(command, arguments.repetitions), "commands")
        for case, command in commands.items():
            done = subprocess.run([command[0], "-X", "importtime", *command[1:]], check=True, capture_output=True, text=True)
            imports_table(report, case, done.stderr)
        modules = {"the SLURM agent": "baton.slurm.agent", "baton submit": "baton.slurm.submit"}
        for title, module in modules.items():
            code = [sys.executable, "-P", "-X", "importtime", "-c", f"import {module}"]
            imports_table(report, title, subprocess.run(code, check=True, capture_output=True, text=True).stderr)
        timed = next(runs)
        first_step(timed, arguments.words, environment | {"PYTHONPROFILEIMPORTTIME": "1"})
        imports_table(report, "a rank", (timed / "attempts" / "0001" / "rank-0.log").read_text())
        command = [sys.executable, "-P", "-X", "importtime", "-m", "baton.launcher.cli", "eval", str(timed)]
        imports_table(report, "baton eval", subprocess.run(command, check=True, capture_output=True, text=True).stderr)
        report.save()


if __name__ == "__main__":
    main()
