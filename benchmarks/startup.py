"""How long commands take to start: from `baton train` to the first step, and which packages each process imports at what cost.

The model has 0.6 million parameters, so nearly all of the time is start-up. Elapsed time is what a user waits, on a machine that
does nothing else. Processor time is the sum over all processes of the run until the first step, on which other programs have little
influence. `cold` runs have empty caches of bytecode and of kernels; `warm` runs are those after one run that has filled them.
`--before FILE` compares with the rows of an earlier run of this program, such as one of an earlier commit on the same machine.

    python benchmarks/startup.py [--ranks 1,2] [--repetitions 3] [--no-cold] [--before FILE] [--name startup_cpu]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from report import Report

BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
HEAVY = ("deepspeed", "fla", "matplotlib", "megatron", "sympy", "tensorboard", "torch", "transformers", "triton")
PARTS_OF_TORCH = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor")
STEPS = 3
RUN = """
name: startup
model: {d_model: 128, n_layers: 5, pattern: [mamba], mixers: {mamba: {d_state: 16}}}
data: {kind: mqar, length: 64, pairs: 4, vocab_size: 64, cases: []}
training:
  context: 128
  global_batch_tokens: 1024
  micro_batch: 2
  precision: float32
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
    """Train a few steps; the run must end well."""
    began = time.monotonic()
    command = [*BATON, "train", str(folder.parent / "run.yaml"), f"directory={folder}", f"training.steps={STEPS}", *words]
    process = psutil.Popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, spent, seen = folder / "metrics.jsonl", 0.0, {}
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        if process.poll() is not None:
            sys.exit(f"the run ended before its first step:\n{process.stdout.read()}")
        seen |= {p.pid: times.user + times.system for p, times in _tree(process)}
        time.sleep(0.02)
    elapsed = time.monotonic() - began
    spent = sum((seen | {p.pid: times.user + times.system for p, times in _tree(process)}).values())
    said, _ = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"the run ended with status {process.returncode}:\n{said}")
    return Start(elapsed, spent)


def _tree(process: psutil.Process) -> list[tuple[psutil.Process, Any]]:
    found = []
    for p in [process, *process.children(recursive=True)]:
        try:
            found.append((p, p.cpu_times()))
        except psutil.Error:  # it has just ended
            continue
    return found


def seconds_of(command: list[str], repetitions: int) -> Start:
    """Of a short command, the best of some runs."""
    found = []
    for _ in range(repetitions):
        began, before = time.monotonic(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        spent = after.children_user - before.children_user + after.children_system - before.children_system
        found.append(Start(time.monotonic() - began, spent))
    return min(found, key=lambda start: start.processor_s)


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
    parser.add_argument("--no-cold", action="store_true")
    parser.add_argument("--before", type=Path, help="results of an earlier run, to compare with")
    parser.add_argument("--name", default="startup_cpu")
    parser.add_argument("words", nargs="*", help="settings of the run, as device=cpu")
    arguments = parser.parse_args()
    before = json.loads(arguments.before.read_text()) if arguments.before else {"rows": [], "commit": "itself"}
    earlier = {(row["case"], row["metric"]): row["ours"] for row in before["rows"]}
    peer = f"before ({before['commit'][:7]})" if earlier else "itself"
    report = Report(arguments.name)
    report.say(f"load of this machine: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")

    def rows(case: str, start: Start, gate: str) -> None:
        for metric, value in (("elapsed s", start.elapsed_s), ("processor s", start.processor_s)):
            report.row(case, metric, value, peer, earlier.get((case, metric), value), gate=gate, higher_is_better=False)

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "run.yaml").write_text(RUN)
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "TRITON_CACHE_DIR": str(folder / "kernels")}
        number = 0
        for ranks in map(int, arguments.ranks.split(",")):
            case = f"baton train, {ranks} rank{'s' if ranks > 1 else ''}"
            words, cold, warm = [f"layout.data={ranks}", *arguments.words], [], []
            if not arguments.no_cold and not cold:
                number += 1
                places = {"PYTHONPYCACHEPREFIX": f"bytecode-{number}", "TRITON_CACHE_DIR": f"kernels-{number}"}
                own = environment | {name: str(folder / place) for name, place in places.items()}
                cold.append(first_step(folder / f"run-{number}", words, own))
            for repetition in range(arguments.repetitions + 1):
                number += 1
                start = first_step(folder / f"run-{number}", words, environment)
                warm += [start] if repetition else []  # the first one fills the caches
            report.gate(case, True, f"every run made its {STEPS} steps and ended well")
            if cold:
                rows(f"{case}, cold", cold[0], case)
            rows(f"{case}, warm", Start(*(statistics.median(part) for part in zip(*map(_pair, warm)))), case)
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
        number += 1
        timed = folder / f"run-{number}"
        first_step(timed, arguments.words, environment | {"PYTHONPROFILEIMPORTTIME": "1"})
        imports_table(report, "a rank", (timed / "attempts" / "0001" / "rank-0.log").read_text())
        for verb in ("evaluate", "generate"):
            command = [sys.executable, "-P", "-X", "importtime", "-m", "baton.launcher.cli", verb, str(timed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                imports_table(report, f"baton {verb}", done.stderr)
        report.save()


def _pair(start: Start) -> tuple[float, float]:
    return start.elapsed_s, start.processor_s


if __name__ == "__main__":
    main()
