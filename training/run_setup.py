"""Everything that a run drives, made in order: data, model and optimizer, checkpoint, kernels, records, callbacks."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from baton.data_pipeline.run_source import ShardSource, TaskSource, open_source
from baton.data_pipeline.steps import StepStream
from baton.kernels.compile.pool import usable_cores
from baton.models.forward_context import ForwardContext
from baton.models.mixer import Mixer
from baton.parallel.mesh import Mesh
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import TrainState, build, make_deterministic
from baton.training.callbacks.callback import Callback, CallbackContext, load_callbacks
from baton.training.callbacks.checkpoint import CheckpointCallback
from baton.training.callbacks.long_context import LongContextCallback
from baton.training.callbacks.metrics import MetricsCallback
from baton.training.callbacks.replica_check import ReplicaCheckCallback
from baton.training.callbacks.state_gradients import StateGradientCallback
from baton.training.callbacks.task_evaluation import TaskEvaluationCallback
from baton.training.callbacks.text_evaluation import TextEvaluationCallback
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.resume import load_initial_weights, open_store, resume
from baton.training.checkpoint.store import CheckpointStore
from baton.training.config_checks import with_vocabulary
from baton.training.errors import RunError
from baton.training.kernel_tools.doctor import check_kernels
from baton.training.monitoring import heartbeat
from baton.training.monitoring.anomaly_detection import AnomalyDetector
from baton.training.monitoring.anomaly_recovery import AnomalyRecovery
from baton.training.monitoring.event_log import EventLog
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.peak_flops import device_peak
from baton.training.monitoring.profiler import Profiler
from baton.training.monitoring.step_timer import StepTimer
from baton.training.monitoring.time_ledger import TimeLedger
from baton.training.run import RunProgress, RunSettings, fingerprints_of, stream_order
from baton.training.step import batch_distribution
from baton.training.step.cuda_graphs import CudaGraphs
from baton.training.step.executor import StepExecutor


@dataclass
class RunClocks:
    """Records of how far the run is: the time ledger and this rank's heartbeat."""

    ledger: TimeLedger
    heartbeat: heartbeat.Heartbeat


@dataclass
class Run:
    """One start of a run. fingerprints: of what must be the same as in the checkpoint. metrics: on the main rank, else None."""

    settings: RunSettings
    mesh: Mesh
    source: ShardSource | TaskSource
    train_state: TrainState
    lanes: LaneStates | None
    store: CheckpointStore
    fingerprints: dict[str, str]
    progress: RunProgress
    clocks: RunClocks
    schedule: CheckpointSchedule
    metrics: MetricsLogger | None
    executor: StepExecutor
    recovery: AnomalyRecovery
    checkpoint_callback: CheckpointCallback
    callbacks: Sequence[Callback]

    def resume(self) -> None:
        """Go back to the newest whole checkpoint."""
        self.progress = _resume(self.source, self.settings, self.train_state, self.lanes, self.store, self.fingerprints)
        if self.executor.anomaly_detector is not None:
            self.executor.anomaly_detector.restore(self.progress.recent)


def prepare_run(settings: RunSettings, mesh: Mesh, clocks: RunClocks) -> Run | None:
    """Make everything that the run drives, in the state of its newest checkpoint; None if the run is complete.

    Raises RunError, CheckpointError, DataError or StorageError: it cannot start.
    """
    training = settings.training
    training.check(mesh.layout.data)
    if training.cuda_graphs is True and mesh.device.type != "cuda":
        raise RunError("training.cuda_graphs=true needs a GPU, and this run is on a CPU; set it to false")
    make_deterministic(training)
    source = open_source(settings.data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    config = with_vocabulary(settings.model, source.vocab_size, tokenizer)
    train_state = build(config, training, mesh)
    _report_layers(train_state)
    store, fingerprints = open_store(settings, mesh), fingerprints_of(config, source, training)
    lanes = LaneStates(train_state.model, training, mesh) if training.carries_lane_states else None
    progress = _resume(source, settings, train_state, lanes, store, fingerprints)
    if progress.step == 0 and training.initial_weights is not None:
        load_initial_weights(train_state, training.initial_weights)
    clocks.ledger.start(progress.step)
    clocks.ledger.charge("start-up")
    if progress.step >= training.steps:
        clocks.ledger.flush()
        if mesh.is_main:
            print(f"already complete: {progress.step} steps, {progress.tokens:,} tokens; there is nothing to do", flush=True)
        return None
    if settings.changed:
        record_changes(settings, progress.step, mesh)
    if mesh.device.type == "cuda":  # on a CPU there are no kernels of our own, and nothing is compiled for the machine
        clocks.heartbeat.beat(0, "compile")
        settings.await_kernels()
        check_kernels(train_state, training)
    clocks.ledger.charge("compile")
    schedule = CheckpointSchedule(training.checkpoint, training.steps, mesh, progress.step)
    metrics, parameters = None, train_state.parameter_count()
    if mesh.is_main:
        remarks = source.remarks() if isinstance(source, ShardSource) else []
        print("\n".join((_greeting(settings, parameters, mesh, progress), *remarks, *settings.notices)), flush=True)
        metrics = MetricsLogger(
            settings.folder,
            step=progress.step,
            total_steps=training.steps,
            log_every=training.log_every,
            config_text=settings.config_text,
            mfu_per_token_rate=_mfu_per_token_rate(settings, mesh, parameters),
            wandb=training.monitoring.wandb,
        )
    profiler = Profiler(settings, mesh, metrics, progress.step, parameters)

    def on_mark(part: str) -> None:
        clocks.heartbeat.beat(run.progress.step + 1, f"after {part}")
        profiler.mark(part)

    timer = StepTimer(mesh.device, on_mark)
    detector = AnomalyDetector(training.guard)
    detector.restore(progress.recent)

    def describe() -> dict[str, Any]:
        return {"fingerprints": fingerprints, "data": source.state(), "recent": detector.recent()}

    checkpoint_callback = CheckpointCallback(train_state, lanes, store, metrics, schedule, settings, describe)
    callbacks: list[Callback] = [
        MetricsCallback(metrics, timer, training, mesh),
        ReplicaCheckCallback(train_state, training, schedule),
        TextEvaluationCallback(train_state, source, metrics, settings)
        if isinstance(source, ShardSource)
        else TaskEvaluationCallback(train_state, source, metrics, settings),
        LongContextCallback(train_state, source, metrics, settings, lambda: executor.close()),
        StateGradientCallback(train_state, metrics, training),
        checkpoint_callback,
        *load_callbacks(training.callbacks, CallbackContext(settings, train_state, metrics)),
        profiler,  # last, so that a profiled step holds nothing else
    ]
    executor = StepExecutor(
        train_state.model,
        train_state.engine,
        mesh,
        timer,
        lanes=lanes,
        anomaly_detector=detector,
        cuda_graphs=CudaGraphs(train_state.model) if training.cuda_graphs is True else None,
    )
    recovery = AnomalyRecovery(training, EventLog(settings.folder, mesh.is_main), mesh, fingerprints)
    recovery.remember(progress.step)
    progress.cursors = recovery.without_documents(progress.cursors)
    run = Run(
        settings, mesh, source, train_state, lanes, store, fingerprints, progress, clocks, schedule, metrics, executor, recovery,
        checkpoint_callback, callbacks,
    )  # fmt: skip
    return run


def _mfu_per_token_rate(settings: RunSettings, mesh: Mesh, parameters: int) -> float | None:
    """Model FLOPs utilisation, 6 FLOPs a parameter and token, at one token a second; None if the device's peak is not known."""
    if mesh.device.type != "cuda":
        return None
    given = None if settings.profile is None else settings.profile.peak_tflops
    peak = device_peak(torch.cuda.get_device_name(mesh.device), settings.training.compute_dtype_on(mesh.device.type), given)
    return None if peak is None else 6.0 * parameters / (mesh.world_size * peak.tflops * 1e12)


def _resume(
    source: ShardSource | TaskSource,
    settings: RunSettings,
    train_state: TrainState,
    lanes: LaneStates | None,
    store: CheckpointStore,
    fingerprints: dict[str, str],
) -> RunProgress:
    order = stream_order(settings.training)

    def adopt(manifest: Manifest) -> None:
        source.adopt(manifest.data, manifest.cursors_of(source.cursor), **order)
        fingerprints["stream"] = source.fingerprint(**order)

    return resume(train_state, lanes, store, fingerprints, source.cursor, adopt)


def open_stream(
    source: ShardSource | TaskSource, settings: RunSettings, mesh: Mesh, progress: RunProgress
) -> AbstractContextManager[StepStream[Any] | None]:
    """This rank's stream of batches from the run's progress on; None on ranks that do not read."""
    if not batch_distribution.is_reader(mesh):
        return nullcontext()
    training = settings.training
    plan = batch_distribution.step_plan(training, mesh, progress.step, settings.data.prefetch)
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if mesh.device.type == "cuda" else 0
    return source.stream(plan, seed=training.seed, cursors=progress.cursors or None, cores=cores)


def record_changes(settings: RunSettings, step: int, mesh: Mesh) -> None:
    """Log in events.jsonl that the run continues with other settings after `step` steps."""
    EventLog(settings.folder, mesh.is_main).write("change", step, settings=settings.changed)
    if mesh.is_main:
        shown = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in settings.changed.items())
        print(f"from here on with other settings: {shown}", flush=True)


def _report_layers(train_state: TrainState) -> None:
    """Make each mixer's forward pass a heartbeat that names its layer."""

    def say(mixer: Any, inputs: Any, named: Any) -> None:
        layer = next((x.layer for x in (*inputs, *named.values()) if isinstance(x, ForwardContext)), "")
        heartbeat.own_heartbeat().set_location(f"in {layer}{mixer.path}")

    for module in train_state.model.modules():
        if isinstance(module, Mixer):
            module.register_forward_pre_hook(say, with_kwargs=True)


def _greeting(settings: RunSettings, parameters: int, mesh: Mesh, progress: RunProgress) -> str:
    training = settings.training
    sizes = ", ".join(f"{name} {n}" for name, n in mesh.layout.sizes().items() if name == "zero" or n > 1)
    return (
        f"{parameters:,} parameters; {mesh.world_size} rank(s) on {mesh.device.type} ({sizes}); "
        f"{training.global_batch_tokens:,} tokens per step, sequence length {training.sequence_length:,}; "
        f"step {progress.step} of {training.steps}"
    )
