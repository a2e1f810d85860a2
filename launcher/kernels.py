"""`baton doctor` and `baton compile`: checks kernels on this machine, and compiles them before a run starts."""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from baton.launcher.ahead import Ahead
from baton.launcher.config import load
from baton.launcher.errors import ConfigError
from baton.launcher.inputs import with_known_vocabulary
from baton.parallel.mesh import local_device
from baton.training.kernel_tools.aot_compile import Target, compile_run_kernels
from baton.training.kernel_tools.doctor import check_result, compile_checks, references


def check_machine(wanted: str) -> int:
    """Compares every recurrence with its reference, prints the results, and returns the exit status.

    wanted: "cpu", "cuda" or "auto". For a GPU, other processes compile all kernels first, while this one computes the references.
    """
    say = partial(print, flush=True)
    # before this process has to do with CUDA: those that compile are forked from it
    gpu = None if wanted == "cpu" else Target.asked()
    if gpu is None:
        expected = references()
    else:
        compiler = Ahead(partial(_compile_checks, gpu))
        reading = threading.Thread(target=compiler.wait, args=(say,), daemon=True)
        reading.start()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the other cores compile
        expected = references()
        torch.set_num_threads(threads)
        reading.join()
    device, findings = local_device(0, 1, wanted), []
    for reference in expected:
        finding = check_result(reference, device)
        say(finding)
        findings.append(finding)
    failed = sum(not finding.passed for finding in findings)
    say(f"{len(findings) - failed} of {len(findings)} checks on {device} passed")
    return 1 if failed else 0


def _compile_checks(gpu: Target, say: Callable[[str], None]) -> None:
    for failure in compile_checks(gpu, say).failures:
        say(f"{failure}; its check compiles it again")


def compile_run(
    path: Path, overrides: list[str], capability: int | None, gpu: str, processes: int | None = None, dearest: int = 0
) -> int:
    """Compiles the kernels that a run launches, and returns the exit status. Progress is printed to stderr.

    capability, gpu: compute capability and name of the GPU; None: this machine's.
    processes: number of compiler processes (default: the usable cores).
    dearest: number of slowest kernels to list.
    """
    wanted = Target.asked() if capability is None else Target(capability, gpu)
    if wanted is None:
        raise ConfigError("there is no GPU here: say which to compile for, e.g. --capability 9.0")
    config, began = with_known_vocabulary(load(path, overrides)), time.monotonic()
    compiled = compile_run_kernels(
        config.model, config.training, config.layout, wanted, processes, partial(print, file=sys.stderr, flush=True)
    )
    for failure in compiled.failures:
        print(f"baton: {failure}", file=sys.stderr)
    total, new, failed = len(compiled.kernels), len(compiled.new), len(compiled.failures)
    counts = f"{new - failed} compiled, {total - new} were there"
    print(f"{total} kernels for {wanted}: {counts}, in {time.monotonic() - began:.0f} s; {compiled.folder}")
    for outcome in sorted(compiled.outcomes, key=lambda outcome: -outcome.seconds)[:dearest]:
        print(f"{outcome.seconds:6.1f} s of processor time: {outcome.name}")
    return 1 if failed else 0
