"""A soak test: one run on a local SLURM with random faults of all kinds, one per minute on average, for a given time.

    .venv/bin/python -P tests/slurm/soak.py [MINUTES]        (make soak: 22 minutes; needs root)

Checked at the end: the ledger sums to the wall time, measured from outside, within 1 %; every step is in the record once, and the
first are those of an undisturbed run to the bit and consumed the same tokens. Reported: the goodput, and, from what a failure cost
here, what it would be at one failure in three hours. Written to tests/slurm/soak.log and soak.json.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.consumed import consumed
from support.jobs import RUN, Job, sandbox, undisturbed

from baton.launcher.cluster import load_cluster
from baton.launcher.run_directory import last_step
from baton.training.monitoring.goodput import compute_goodput

MEAN_S = 60.0
NODES = 5
COMPARED = 1500
"""Steps that are compared with those of an undisturbed run."""

LOG = Path(__file__).with_suffix(".log")


def say(text: str) -> None:
    line = f"{time.strftime('%H:%M:%S')}  {text}"
    print(line, flush=True)
    with LOG.open("a") as f:
        f.write(line + "\n")


class Soak:
    """folder: everything of it. A fault befalls the run in whatever state it is: in start-up, in a save, in a queue."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.dead: dict[str, float] = {}
        settings = RUN | {"name": "soak"}
        settings["training"] = RUN["training"] | {
            "steps": 1_000_000,
            "schedule": {"kind": "constant"},
            "evaluation": {"every": 500, "tokens": 600},
            "checkpoint": {"every": 50, "keep_last": 3},
        }
        settings["jobs"] = RUN["jobs"] | {
            "max_failures": 10_000,
            "max_node_failures": 10_000,
            "max_failures_without_progress": 20,
        }
        self.run = folder / "run.yaml"
        self.run.write_text(yaml.safe_dump(settings))
        cluster = load_cluster("sandbox").model_dump(mode="json")
        cluster["slurm"] |= {"scratch": str(folder / "scratch"), "preflight": cluster["slurm"]["preflight"] | {"files_mb_s": 0}}
        self.cluster = folder / "cluster.yaml"
        self.cluster.write_text(yaml.safe_dump(cluster))
        self.job = Job(folder / "runs" / "soak", folder)

    def faults(self):
        return {
            "a rank is killed": self.kill_rank,
            "a rank hangs": self.stop_rank,
            "a node loses its power": self.power_off,
            "the time is nearly up": lambda: self.signal_job("--batch", "--signal=USR1"),
            "the job is requeued by somebody": self.requeue,
            "a more important job comes": self.preempt,
            "an agent is killed": self.kill_agent,
            "slurmctld is killed, and started again": self.restart_controller,
        }

    def kill_rank(self):
        if ranks := self.job.ranks():
            self.rng.choice(ranks).send_signal(signal.SIGKILL)

    def stop_rank(self):
        if ranks := self.job.ranks():
            self.rng.choice(ranks).send_signal(signal.SIGSTOP)

    def power_off(self):
        if rows := self.job.rows("attempt"):
            node = self.rng.choice(rows[-1]["nodes"])
            sandbox("fail", node)
            self.dead[node] = time.monotonic()

    def repair(self):
        """Dead nodes come back after a minute, and are used again."""
        for node, since in list(self.dead.items()):
            if time.monotonic() - since > 60:
                sandbox("restore", node)
                del self.dead[node]
        for node in self.excluded():
            if node not in self.dead:
                self.job.baton("readmit", self.job.folder, node)

    def excluded(self) -> list[str]:
        path = self.job.folder / "excluded.txt"
        return [node for node in path.read_text().split(",") if node] if path.exists() else []

    def signal_job(self, *words):
        for number in self.job.ids("running"):
            subprocess.run(["scancel", *words, number], capture_output=True)

    def requeue(self):
        for number in self.job.ids("running"):
            subprocess.run(["scontrol", "requeue", number], capture_output=True)

    def preempt(self):
        script = self.folder / "urgent.sbatch"
        script.write_text(f"#!/bin/bash\n#SBATCH --partition=urgent --nodes={NODES - 1} --exclusive --output=/dev/null\nsleep 5\n")
        subprocess.run(["sbatch", script], capture_output=True)

    def kill_agent(self):
        found = [parent for rank in self.job.ranks() if (parent := rank.parent()) and "baton.slurm.agent" in parent.cmdline()]
        if found:
            self.rng.choice(found).send_signal(signal.SIGKILL)

    def restart_controller(self):
        pid = (Path(os.environ["SLURM_SANDBOX_DIR"]) / "run" / "slurmctld.pid").read_text().strip()
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(2)
        sandbox("up") if not self.dead else subprocess.run(["slurmctld"], env=os.environ | owner(), check=True)

    def soak(self, minutes: float) -> dict:
        begun = time.time()
        self.job.submit(self.run, self.cluster)
        deadline, counts = time.monotonic() + 60 * minutes, dict.fromkeys(self.faults(), 0)
        while time.monotonic() < deadline:
            pause = time.monotonic() + self.rng.expovariate(1 / MEAN_S)
            while time.monotonic() < min(pause, deadline):
                time.sleep(2)
                self.repair()
                assert not self.job.rows("stopped"), f"{self.job.rows('stopped')}\n{self.job.said()}"
            name, fault = self.rng.choice(list(self.faults().items()))
            say(f"step {last_step(self.job.folder)}, attempt {len(self.job.rows('attempt'))}: {name}")
            with contextlib.suppress(ProcessLookupError):
                fault()
            counts[name] += 1
        say("enough: it is left alone until it trains, and then told to save and end")
        attempts = len(self.job.rows("attempt"))
        before, patience = last_step(self.job.folder), time.monotonic() + 120
        while time.monotonic() < patience and last_step(self.job.folder) <= before + 20:
            time.sleep(1)
            self.repair()
        self.job.baton("cancel", self.job.folder)
        self.job.wait()
        return {"wall_s": time.time() - begun, "faults": counts, "attempts": attempts}


def owner() -> dict[str, str]:
    """The mark by which the tool knows its daemons."""
    return {"SLURM_SANDBOX_OWNER": os.environ["SLURM_SANDBOX_DIR"]}


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 22.0
    seed = int(os.environ.get("BATON_SOAK_SEED", "0"))
    LOG.unlink(missing_ok=True)
    made = sandbox("up", str(NODES), "2")
    if made.returncode:
        print(made.stderr, file=sys.stderr)
        return 2
    os.environ.update(dict(line.removeprefix("export ").split("=", 1) for line in made.stdout.splitlines()))
    folder = Path(tempfile.mkdtemp(prefix="baton-soak-"))
    say(f"$ python tests/slurm/soak.py {minutes:g}")
    say(f"seed {seed}; {NODES} nodes, the run on 2 of them with 2 ranks each; load of the machine before: {os.getloadavg()[0]:.1f}")
    soak = Soak(folder, seed)
    try:
        seen = soak.soak(minutes)
    finally:
        soak.job.end()
        sandbox("down")
    found = compute_goodput(soak.job.folder)
    for line in found.lines():
        say(line)
    off = abs(sum(found.seconds.values()) - seen["wall_s"]) / seen["wall_s"]
    say(f"the ledger sums to {sum(found.seconds.values()):.1f} s, the wall time is {seen['wall_s']:.1f} s: {off:.2%} off")
    losses = soak.job.losses()
    whole = [step for step, _, _ in losses] == list(range(1, len(losses) + 1))
    say(f"{len(losses)} steps, each recorded once: {whole}")
    count = min(COMPARED, len(losses))
    calm = undisturbed(folder / "calm", soak.run, f"training.steps={count}", "training.evaluation.every=0")
    same = losses[:count] == calm.losses()
    say(f"the first {count} losses and gradient norms are an undisturbed run's to the bit: {same}")
    fed = consumed(soak.job.folder)[:count] == consumed(calm.folder)
    say(f"and so is what each of them consumed: {fed}")
    result = seen | found.to_json() | at_three_hours(found, sum(seen["faults"].values()))
    result |= {"ledger_off": off, "same_bits": same, "same_tokens": fed}
    result.pop("attempts")
    say(f"{sum(seen['faults'].values())} faults: " + ", ".join(f"{count} x {name}" for name, count in seen["faults"].items()))
    say(
        f"a fault cost {result['cost_of_a_fault_s']:.1f} s in the mean; at one in three hours the goodput would be "
        f"{result['goodput_at_3h']:.2%} of all time, of {result['goodput_without_faults']:.2%} without any"
    )
    LOG.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if off <= 0.01 and whole and same and fed else 1


def at_three_hours(found, faults: int) -> dict[str, float]:
    """Time that faults cost is what a calm run has not: work lost, ends to be noticed, starts, checks, queues. In the three hours
    between two faults the rest is shared as it is here."""
    of_faults = ("lost", "failing", "start-up", "preflight", "queue", "idle", "compile")
    cost = sum(found.seconds[part] for part in of_faults) / max(1, faults)
    calm = sum(s for part, s in found.seconds.items() if part not in of_faults)
    without = (found.seconds["compute"] + found.seconds["exchange"]) / calm
    between = 3 * 3600.0
    return {"cost_of_a_fault_s": cost, "goodput_without_faults": without, "goodput_at_3h": without * (between - cost) / between}


if __name__ == "__main__":
    sys.exit(main())
