"""Profiles a few steps: `profile=true` writes their trace, and a table as text and JSON, into RUN/profile.

Profiling does not change results. It slows steps down, because every operator is recorded, so the table also states the
time of the unprofiled steps before, and rates and utilization are computed from that.
"""

import gc
import gzip
import json
import os
import platform
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from baton.parallel.mesh import Mesh
from baton.parallel.profiler_ranges import MARK, STEP, profiler_range
from baton.training.callbacks.callback import Callback
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.peak_flops import Utilisation, device_peak
from baton.training.monitoring.profile_table import ProfileTable, tabulate
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult

FOLDER = "profile"
_COMPRESSION = 3  # traces are large, and others wait while they are written


class Profiler(Callback):
    """Profiles the steps that `settings.profile` names. start: steps done when this start begins. parameters: of the whole
    model."""

    slow = True

    def __init__(self, settings: RunSettings, mesh: Mesh, metrics: MetricsLogger | None, start: int, parameters: int) -> None:
        self._settings, self._mesh, self._metrics, self._parameters = settings, mesh, metrics, parameters
        wanted = settings.profile
        looks = wanted is not None and (mesh.is_main or wanted.ranks == "all")
        self._steps = (
            range(0) if wanted is None else range(start + wanted.skip_steps + 1, start + wanted.skip_steps + wanted.steps + 1)
        )
        self._left = looks and self._steps.stop - 1 <= settings.training.steps
        if looks and not self._left and mesh.is_main:
            print(
                f"nothing is profiled: {settings.training.steps - start} steps are left, and profile.skip_steps and profile.steps "
                f"take {self._steps.stop - 1 - start}",
                flush=True,
            )
        self._profile: Any = None
        self._step: Any = None
        self._began: float | None = None
        self._before: list[float] = []

    def mark(self, part: str) -> None:
        """A part of the step ends here."""
        if self._step is not None:
            with profiler_range(MARK, part):
                pass

    def on_train_start(self, progress: RunProgress) -> None:
        self._begin(progress.step + 1)

    def on_rollback(self, progress: RunProgress) -> None:
        """An unfinished profile is discarded."""
        self._began = None
        if self._step is not None:
            self._end_step()
            self._profile.stop_trace()
            self._profile, self._left = None, False
        self._begin(progress.step + 1)

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if not self._left:
            return
        if self._step is not None:
            self._end_step()
            if progress.step + 1 not in self._steps or progress.stop_requested:
                self._finish(progress.step)
                return
        now = time.perf_counter()
        # the first step compiles, and the one in which the profiler gets ready waits for that
        if self._began is not None and self._profile is None:
            self._before.append(now - self._began)
        self._began = now
        self._begin(progress.step + 1)

    def _begin(self, step: int) -> None:
        """Prepare for step `step`."""
        if not self._left:
            return
        if self._profile is None and step == self._steps.start - 1:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.prepare_trace()
        if self._profile is not None and step in self._steps:
            if step == self._steps.start:
                self._wait()
                self._profile.start_trace()
            self._step = record_function(f"{STEP}{step}")
            self._step.__enter__()

    def _end_step(self) -> None:
        self._wait()  # so that the step's kernels are within it
        self._step.__exit__(None, None, None)
        self._step = None

    @property
    def _on_gpu(self) -> bool:
        return self._mesh.device.type == "cuda"

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._mesh.device)

    def _finish(self, step: int) -> None:
        self._profile.stop_trace()
        # a trace is millions of objects, none of them in a cycle: looking for cycles among them is 2 fifths of the time
        collects = gc.isenabled()
        gc.disable()
        try:
            self._record(step)
        finally:
            if collects:
                gc.enable()
        self._profile, self._left = None, False

    def _record(self, step: int) -> None:
        folder = self._settings.folder / FOLDER
        name = f"step-{self._steps.start:08d}-rank-{self._mesh.rank}"
        try:
            folder.mkdir(exist_ok=True)
            events = _write_trace(self._profile, folder / f"{name}.trace.json.gz")
            table = tabulate(events, on_gpu=self._on_gpu)
            used = self._utilisation(table, step)
            found = {
                "run": self._settings.folder.name,
                "rank": self._mesh.rank,
                "ranks": self._mesh.world_size,
                "device": self._device,
                "profiled": table.to_json(),
                "unprofiled_ms": statistics.median(self._before) * 1000 if self._before else None,
                "utilisation": used.to_json(),
            }
            text = "\n".join(self._lines(table, used)) + "\n"
            _write(folder / f"{name}.json", json.dumps(found, indent=1) + "\n")
            _write(folder / f"{name}.txt", text)
        except (OSError, ValueError) as error:
            print(f"the profile cannot be written ({error}); the run goes on", flush=True)
        else:
            if self._metrics is not None:
                self._metrics.log_profile(f"{text}written to {folder / name}.txt, .json and .trace.json.gz")

    @property
    def _device(self) -> str:
        return torch.cuda.get_device_name(self._mesh.device) if self._on_gpu else f"CPU ({platform.machine()})"

    def _utilisation(self, table: ProfileTable, step: int) -> Utilisation:
        settings = self._settings
        assert settings.profile is not None
        at = settings.training.at(step - 1)
        return Utilisation(
            parameters=self._parameters,
            flops=None if settings.flops_per_token is None else settings.flops_per_token(at),
            tokens=at.global_batch_tokens,
            seconds=statistics.median(self._before) if self._before else table.ms / 1000,
            devices=self._mesh.world_size,
            peak=device_peak(
                self._device, settings.training.compute_dtype_on(self._mesh.device.type), settings.profile.peak_tflops
            ),
        )

    def _lines(self, table: ProfileTable, used: Utilisation) -> list[str]:
        first, last = table.steps[0]["step"], table.steps[-1]["step"]
        steps = f"step {first}" if first == last else f"steps {first} to {last}, their mean"
        before = f", without the profiler {used.seconds * 1000:,.2f} ms (median of {len(self._before)} steps before)"
        rank = f"rank {self._mesh.rank} of {self._mesh.world_size} ({self._device})"
        return [
            f"profile of {self._settings.folder.name}, {steps}, {rank}",
            *table.lines(),
            f"a step took {table.ms:,.2f} ms" + (before if self._before else ""),
            f"{used.tokens_per_s:,.0f} tokens/s of {used.devices} rank(s), {used.tokens:,} tokens a step, N = {used.parameters:,}",
            str(used),
        ]


def _write_trace(profiler: Any, path: Path) -> list[dict[str, Any]]:
    """Write the trace as a file for Perfetto or chrome://tracing; returns its events."""
    plain = path.with_name(f".{path.name.removesuffix('.gz')}")
    try:
        profiler.export_chrome_trace(str(plain))
        aside = path.with_name(f".{path.name}.new")
        with open(plain, "rb") as source, gzip.open(aside, "wb", compresslevel=_COMPRESSION) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        os.replace(aside, path)
        with open(plain, encoding="utf-8", errors="replace") as text:
            events: list[dict[str, Any]] = json.load(text)["traceEvents"]
    finally:
        plain.unlink(missing_ok=True)
    return events


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
