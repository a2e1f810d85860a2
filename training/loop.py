"""The loop of a run: resume if there is something to resume, then steps, with everything optional hung on as callbacks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from baton.data_pipeline.errors import StorageError
from baton.data_pipeline.run_source import ShardSource, TaskSource, open_source
from baton.data_pipeline.steps import Steps
from baton.models.mixer import Mixer
from baton.parallel import comm_timing
from baton.parallel.mesh import Mesh
from baton.parallel.tensor import drop_cast_weights
from baton.training import preemption
from baton.training.bptt.lane_states import LANE_STATE_PREFIX, LaneStates
from baton.training.build import TrainState, build, make_deterministic
from baton.training.callbacks import (
    CheckpointCallback,
    LongContextCallback,
    MetricsCallback,
    ReplicaCheckCallback,
    StateGradientCallback,
    TaskEvaluationCallback,
    TextEvaluationCallback,
)
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.checkpoint.manifest import Manifest, versions
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore, newest
from baton.training.checkpoint.tools import load_weights
from baton.training.config_checks import with_vocabulary
from baton.training.doctor import check_kernels
from baton.training.errors import CheckpointError, RunError, StoppedError
from baton.training.lr_schedule import learning_rates
from baton.training.monitoring import heartbeat
from baton.training.monitoring.anomaly_detection import AnomalyDetector, EventLog
from baton.training.monitoring.anomaly_recovery import AnomalyRecovery, with_skipped
from baton.training.monitoring.goodput_tensorboard import GoodputTensorBoard
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.profiler import Profiler
from baton.training.monitoring.step_timer import StepTimer
from baton.training.monitoring.time_ledger import TimeLedger, process_start_time
from baton.training.run import Callback, RunProgress, RunSettings, fingerprints_of, stream_order
from baton.training.step import batch_distribution
from baton.training.step.cuda_graphs import CudaGraphs
from baton.training.step.executor import StepExecutor


def train(settings: RunSettings, mesh: Mesh) -> None:
    """Train to the last step, from the newest whole checkpoint if there is one. Every rank calls it.

    Raises StoppedError when it was asked to end before: what was done is saved. Raises StorageError when the last save, or the last
    rows of the record, could not be written, though it was tried several times.
    """
    training = settings.training
    beats = heartbeat.own_heartbeat()
    beats.beat(0, "start-up")
    ledger = TimeLedger(settings.folder, settings.attempt, enabled=mesh.is_main, since=process_start_time())
    training.check(mesh.layout.data)
    if training.cuda_graphs and mesh.device.type != "cuda":
        raise RunError("training.cuda_graphs=true needs a GPU, and this run is on a CPU; set it to false")
    make_deterministic(training)
    source = open_source(settings.data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    config = with_vocabulary(settings.model, source.vocab_size, tokenizer)
    train_state = build(config, training, mesh)
    _say_where(train_state)
    store = open_store(settings, mesh)
    order, fingerprints = stream_order(training), fingerprints_of(config, source, training)
    lanes = LaneStates(train_state.model, training, mesh) if training.carries_lane_states else None

    def adopt(manifest: Manifest) -> None:
        cursors: Any = {int(lane): source.cursor(cursor) for lane, cursor in manifest.cursors.items()}
        source.adopt(manifest.data, cursors, **order)
        fingerprints["stream"] = source.fingerprint(**order)

    progress = resume(train_state, lanes, store, fingerprints, source.cursor, adopt)
    if progress.step == 0 and training.initial_weights is not None:
        load_initial_weights(train_state, Path(training.initial_weights))
    if progress.step >= training.steps:
        ledger.start(progress.step)
        ledger.charge("start-up")
        ledger.flush()
        if mesh.is_main:
            print(f"already complete: {progress.step} steps, {progress.tokens:,} tokens; there is nothing to do", flush=True)
        return
    if settings.changed:
        record_changes(settings, progress.step, mesh)
    ledger.start(progress.step)
    ledger.charge("start-up")
    if mesh.device.type == "cuda":  # on a CPU there are no kernels of our own, and nothing is compiled for the machine
        beats.beat(0, "compile")
        settings.await_kernels()
        check_kernels(train_state, training)
    ledger.charge("compile")
    schedule = CheckpointSchedule(training.checkpoint, training.steps, mesh, progress.step)
    replica_check = ReplicaCheckCallback(train_state, training, schedule)
    replica_check.before_first_step(progress)
    metrics, parameters = None, train_state.parameter_count()
    if mesh.is_main:
        print("\n".join((_greeting(settings, parameters, mesh, progress), *settings.notices)), flush=True)
        metrics = MetricsLogger(
            settings.folder,
            step=progress.step,
            total_steps=training.steps,
            log_every=training.log_every,
            config_text=settings.config_text,
        )
    tensorboard = GoodputTensorBoard(settings.folder, progress.step) if mesh.is_main else None
    profiler = Profiler(settings, mesh, metrics, progress.step, parameters)

    def told(part: str) -> None:
        beats.beat(progress.step + 1, f"after {part}")
        profiler.mark(part)

    timer = StepTimer(mesh.device, told)
    cuda_graphs = CudaGraphs(train_state.model) if training.cuda_graphs else None
    executor = StepExecutor(
        train_state.model,
        train_state.engine,
        mesh,
        timer,
        lanes=lanes,
        anomaly_detector=AnomalyDetector(training.guard),
        cuda_graphs=cuda_graphs,
    )
    evaluator: Callback
    if isinstance(source, ShardSource):
        evaluator = TextEvaluationCallback(train_state, source, metrics, settings)
    else:
        evaluator = TaskEvaluationCallback(train_state, source, metrics, settings)
    state_gradients = StateGradientCallback(train_state, metrics, training)
    state_gradients.before_first_step(progress)
    checkpoint_callback = CheckpointCallback(
        train_state, lanes, store, metrics, schedule, settings, lambda: {"fingerprints": fingerprints, "data": source.state()}
    )
    callbacks: Sequence[Callback] = [
        MetricsCallback(metrics, timer, training, mesh),
        replica_check,
        evaluator,
        LongContextCallback(train_state, source, metrics, settings),
        state_gradients,
        checkpoint_callback,
        profiler,  # last, so that a step is all that happens until the next one
    ]
    recovery = AnomalyRecovery(training.guard, EventLog(settings.folder, mesh.is_main), mesh)
    times = RunClocks(ledger, beats, tensorboard, schedule)
    if training.guard.policy == "rollback" and progress.step == 0:
        checkpoint_callback.save(progress)  # there must be something to go back to
        checkpoint_callback.finish()
        checkpoint_callback.save_again(progress)
        ledger.charge("save")
        _require_saved(store, progress)
    progress.stop_requested, _ = preemption.sync_stop_request(mesh)
    profiler.before_first_step(progress)
    try:
        while _steps(progress, source, settings, mesh, executor, callbacks, recovery, times):
            checkpoint_callback.finish()
            beats.set_warm(False)
            beats.beat(progress.step, "going back to a checkpoint")
            progress = resume(train_state, lanes, store, fingerprints, source.cursor, adopt)
            progress.cursors = with_skipped(progress.cursors, recovery.skip_documents)
            state_gradients.before_first_step(progress)
            profiler.before_first_step(progress)
            if metrics is not None:
                metrics.rewind(progress.step)
            ledger.charge("start-up")
            ledger.flush()
            ledger.start(progress.step)  # what was done beyond was in vain
            progress.stop_requested, _ = preemption.sync_stop_request(mesh)
    except (RunError, StorageError):  # all ranks raise it alike; what is being written is of before, and sound
        checkpoint_callback.finish()
        raise
    unwritten = None if metrics is None else metrics.close()
    if tensorboard is not None:
        tensorboard.close()
    ledger.charge("other")
    ledger.flush()
    _require_saved(store, progress)
    if unwritten is not None:
        raise StorageError(f"{unwritten}. The checkpoint of step {progress.step} is saved")
    if progress.step < training.steps:
        raise StoppedError(f"stopped after step {progress.step} of {training.steps}, as asked; the next start goes on from there")
    if mesh.is_main:
        print(f"done: {progress.step} steps, {progress.tokens:,} tokens", flush=True)


class RunClocks(NamedTuple):
    """Who is told what the run is doing and how far it is, step by step."""

    ledger: TimeLedger
    beats: heartbeat.Heartbeat
    tensorboard: GoodputTensorBoard | None
    schedule: CheckpointSchedule


def _steps(
    progress: RunProgress,
    source: ShardSource | TaskSource,
    settings: RunSettings,
    mesh: Mesh,
    executor: StepExecutor,
    callbacks: Sequence[Callback],
    recovery: AnomalyRecovery,
    times: RunClocks,
) -> bool:
    """Steps from where the run stands, to its end (progress is then of there), or (True) until one makes it go back."""
    training, timer, every = settings.training, executor.timer, settings.training.monitoring.update_norm_every
    ledger, beats, tensorboard, schedule = times
    with open_stream(source, settings, mesh, progress) as stream:
        batches = batch_distribution.step_batches(stream, mesh, training, progress.step)
        new_shapes = {progress.step, *(first for first, _ in training.stretches)}
        ledger.charge("start-up")
        while progress.step < training.steps and not progress.stop_requested:
            beats.set_warm(progress.step not in new_shapes)
            beats.beat(progress.step + 1, "data")
            timer.start()
            data = next(batches)
            timer.mark("data")
            ledger.charge("data")
            comm_timing.take_wait_seconds()
            executor.segments = data.segments
            executor.compute_update_norm = bool(every) and (progress.step + 1) % every == 0
            result = executor.step(data.batches, learning_rates(progress.step, training), data.checksum)
            bad = result.anomaly is not None
            if bad and recovery.respond(result, progress.step, progress.cursors, data, stream) == "rollback":
                ledger.charge("compute")
                return True
            progress.advance(training.at(progress.step).global_batch_tokens, data.cursors)
            progress.stop_requested, progress.data_wait_s = preemption.sync_stop_request(mesh, data.wait_s)
            ledger.charge("compute")
            ledger.reassign("compute", "exchange", comm_timing.take_wait_seconds())
            due = schedule.due(progress.step, stop_requested=progress.stop_requested)
            beats.set_warm()
            for callback in callbacks:
                name = type(callback).__name__ if callback.time_category == "other" else callback.time_category
                beats.beat(progress.step, name, slow=isinstance(callback, Profiler))
                callback.after_step(progress, result)
                ledger.charge(callback.time_category)
            ledger.step_done(progress.step, write=due)
            if due and tensorboard is not None:
                tensorboard.show(progress.step)
                ledger.charge("other")
    return False


def record_changes(settings: RunSettings, step: int, mesh: Mesh) -> None:
    """Write into events.jsonl that the run goes on with other settings after `step` steps."""
    EventLog(settings.folder, mesh.is_main).write("change", step, settings=settings.changed)
    if mesh.is_main:
        shown = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in settings.changed.items())
        print(f"from here on with other settings: {shown}", flush=True)


def _require_saved(store: CheckpointStore, progress: RunProgress) -> None:
    """Raise StorageError, on all ranks, when the run ends here and its last save has failed."""
    if store.problem is not None:
        last = newest(store.folder)
        kept = "no checkpoint is there" if last is None else f"the newest checkpoint is {last.name}"
        raise StorageError(
            f"{store.folder}: step {progress.step} could not be saved ({store.problem}), and {kept}; make room, then start again: "
            f"the run goes on from there"
        )


def _say_where(train_state: TrainState) -> None:
    """From now on each mixer's forward pass is a sign of life that names its layer."""

    def say(mixer: Any, inputs: Any) -> None:
        heartbeat.own_heartbeat().set_location(f"in {mixer.where}")

    for module in train_state.model.modules():
        if isinstance(module, Mixer):
            module.register_forward_pre_hook(say)


def load_initial_weights(train_state: TrainState, path: Path) -> None:
    """Give the model somebody's weights. Raises CheckpointError."""
    load_weights(path, optimizer_boxes(train_state.model, train_state.engine, train_state.mesh, for_save=False))
    train_state.engine.masters_changed()
    drop_cast_weights(train_state.model)
    if train_state.mesh.is_main:
        print(f"beginning with the weights of {path}", flush=True)


def open_store(settings: RunSettings, mesh: Mesh) -> CheckpointStore:
    """The run's checkpoints."""
    kept = settings.training.checkpoint
    return CheckpointStore(
        settings.folder / "checkpoints",
        mesh,
        kept.keep_last,
        keep_every=kept.keep_every,
        keep_best=kept.keep_best,
        async_save=kept.async_save,
    )


def open_stream(
    source: ShardSource | TaskSource, settings: RunSettings, mesh: Mesh, progress: RunProgress
) -> AbstractContextManager[Steps[Any] | None]:
    """This rank's stream of batches from where the run stands; None on ranks that receive instead of reading."""
    if not batch_distribution.is_reader(mesh):
        return nullcontext()
    training = settings.training
    plan = batch_distribution.step_plan(training, mesh, progress.step, settings.data.prefetch)
    return source.stream(plan, seed=training.seed, cursors=progress.cursors or None)


def resume(
    train_state: TrainState,
    lanes: LaneStates | None,
    store: CheckpointStore,
    fingerprints: dict[str, str],
    cursor: Callable[[dict[str, Any]], Any],
    adopt: Callable[[Manifest], None] = lambda manifest: None,
) -> RunProgress:
    """Load the newest whole checkpoint into the engine and the lanes; without any, the run stands at its beginning.

    cursor: makes a lane's cursor of its JSON. adopt: what else goes on from the manifest, before fingerprints are compared.
    """

    def accept(manifest: Manifest) -> None:
        if manifest.fingerprints.get("model") == fingerprints.get("model"):
            adopt(manifest)
        for what, ours in fingerprints.items():
            if manifest.fingerprints.get(what) != ours:
                raise CheckpointError(
                    f"{store.folder}: the checkpoint of step {manifest.step} was made with another {what} (settings, tokenizer or "
                    f"data differ); use the run's own configuration, or another run directory"
                )

    found = store.load_newest(accept)
    if found is None:
        return RunProgress(0, 0, {})
    path, manifest = found
    boxes = optimizer_boxes(train_state.model, train_state.engine, train_state.mesh, for_save=False)
    if lanes is not None:
        if any(key.startswith(LANE_STATE_PREFIX) for key in manifest.tensors):
            boxes |= lanes.boxes(for_save=False)
        else:  # a fork that begins its data anew
            lanes.clear()
    store.read(path, boxes)
    train_state.engine.updates = manifest.adam_steps
    train_state.engine.masters_changed()
    drop_cast_weights(train_state.model)
    mesh = train_state.mesh
    cursors = {int(j): cursor(c) for j, c in manifest.cursors.items() if int(j) % mesh.layout.data == mesh.data_rank}
    if mesh.is_main:
        print(f"resuming from {path.name} ({manifest.tokens:,} tokens)", flush=True)
        changed = [
            f"{name} {manifest.versions[name]} -> {v}" for name, v in versions().items() if manifest.versions.get(name, v) != v
        ]
        if changed:
            print(f"since {path.name}: {', '.join(changed)}; what is computed is the same but for its last bits", flush=True)
    return RunProgress(manifest.step, manifest.tokens, cursors)


def _greeting(settings: RunSettings, parameters: int, mesh: Mesh, progress: RunProgress) -> str:
    training = settings.training
    sizes = ", ".join(f"{name} {n}" for name, n in mesh.layout.sizes().items() if name == "zero" or n > 1)
    return (
        f"{parameters:,} parameters; {mesh.world_size} rank(s) on {mesh.device.type} ({sizes}); "
        f"{training.global_batch_tokens:,} tokens per step, sequence length {training.sequence_length:,}; "
        f"step {progress.step} of {training.steps}"
    )
