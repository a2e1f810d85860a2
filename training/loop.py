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
from baton.training.bptt.lane_states import CARRIED, LaneStates
from baton.training.build import Built, build, make_deterministic
from baton.training.callbacks import CotangentNorms, Evaluator, LongContext, Recorder, ReplicaCheck, Saver, TaskEvaluator
from baton.training.checkpoint.interval import SaveSchedule
from baton.training.checkpoint.manifest import Manifest, versions
from baton.training.checkpoint.shard_boxes import optimizer_rectangles
from baton.training.checkpoint.store import CheckpointStore, newest
from baton.training.checkpoint.tools import load_weights
from baton.training.config_checks import with_vocabulary
from baton.training.doctor import check_kernels
from baton.training.errors import CheckpointError, RunError, StoppedError
from baton.training.lr_schedule import learning_rates
from baton.training.monitoring import heartbeat
from baton.training.monitoring.anomaly_detection import Events, Judge
from baton.training.monitoring.anomaly_recovery import Recovery, without
from baton.training.monitoring.goodput_tensorboard import LedgerBoard
from baton.training.monitoring.metrics import Monitor
from baton.training.monitoring.profiler import Profiler
from baton.training.monitoring.step_timer import StepClock
from baton.training.monitoring.time_ledger import Account, process_began
from baton.training.run import Callback, Progress, RunSettings, fingerprints_of, stream_order
from baton.training.step import batch_distribution
from baton.training.step.cuda_graphs import Graphs
from baton.training.step.executor import StepExecutor


def train(settings: RunSettings, mesh: Mesh) -> None:
    """Train to the last step, from the newest whole checkpoint if there is one. Every rank calls it.

    Raises StoppedError when it was asked to end before: what was done is saved. Raises StorageError when the last save, or the last
    rows of the record, could not be written, though it was tried several times.
    """
    training = settings.training
    signs = heartbeat.own()
    signs.beat(0, "start-up")
    account = Account(settings.folder, settings.attempt, on=mesh.is_main, since=process_began())
    training.check(mesh.layout.data)
    if training.cuda_graphs and mesh.device.type != "cuda":
        raise RunError("training.cuda_graphs=true needs a GPU, and this run is on a CPU; set it to false")
    make_deterministic(training)
    source = open_source(settings.data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    config = with_vocabulary(settings.model, source.vocab_size, tokenizer)
    built = build(config, training, mesh)
    _say_where(built)
    store = open_store(settings, mesh)
    order, fingerprints = stream_order(training), fingerprints_of(config, source, training)
    lanes = LaneStates(built.model, training, mesh) if training.carries else None

    def adopt(manifest: Manifest) -> None:
        cursors: Any = {int(lane): source.cursor(cursor) for lane, cursor in manifest.cursors.items()}
        source.adopt(manifest.data, cursors, **order)
        fingerprints["stream"] = source.fingerprint(**order)

    progress = resume(built, lanes, store, fingerprints, source.cursor, adopt)
    if progress.step == 0 and training.initial_weights is not None:
        begin_with(built, Path(training.initial_weights))
    if progress.step >= training.steps:
        account.start(progress.step)
        account.spent("start-up")
        account.flush()
        if mesh.is_main:
            print(f"already complete: {progress.step} steps, {progress.tokens:,} tokens; there is nothing to do", flush=True)
        return
    if settings.changed:
        record_changes(settings, progress.step, mesh)
    account.start(progress.step)
    account.spent("start-up")
    if mesh.device.type == "cuda":  # on a CPU there are no kernels of our own, and nothing is compiled for the machine
        signs.beat(0, "compile")
        settings.await_kernels()
        check_kernels(built, training)
    account.spent("compile")
    schedule = SaveSchedule(training.checkpoint, training.steps, mesh, progress.step)
    replica_check = ReplicaCheck(built, training, schedule)
    replica_check.before_first_step(progress)
    monitor, parameters = None, built.parameter_count()
    if mesh.is_main:
        print("\n".join((_greeting(settings, parameters, mesh, progress), *settings.notices)), flush=True)
        monitor = Monitor(
            settings.folder,
            step=progress.step,
            total_steps=training.steps,
            log_every=training.log_every,
            config_text=settings.config_text,
        )
    board = LedgerBoard(settings.folder, progress.step) if mesh.is_main else None
    profiler = Profiler(settings, mesh, monitor, progress.step, parameters)

    def told(part: str) -> None:
        signs.beat(progress.step + 1, f"after {part}")
        profiler.mark(part)

    clock = StepClock(mesh.device, told)
    graphs = Graphs(built.model) if training.cuda_graphs else None
    executor = StepExecutor(built.model, built.engine, mesh, clock, lanes=lanes, judge=Judge(training.guard), graphs=graphs)
    evaluator: Callback
    if isinstance(source, ShardSource):
        evaluator = Evaluator(built, source, monitor, settings)
    else:
        evaluator = TaskEvaluator(built, source, monitor, settings)
    cotangents = CotangentNorms(built, monitor, training)
    cotangents.before_first_step(progress)
    saver = Saver(built, lanes, store, monitor, schedule, settings, lambda: {"fingerprints": fingerprints, "data": source.state()})
    callbacks: Sequence[Callback] = [
        Recorder(monitor, clock, training, mesh),
        replica_check,
        evaluator,
        LongContext(built, source, monitor, settings),
        cotangents,
        saver,
        profiler,  # last, so that a step is all that happens until the next one
    ]
    recovery = Recovery(training.guard, Events(settings.folder, mesh.is_main), mesh)
    times = Times(account, signs, board, schedule)
    if training.guard.policy == "rollback" and progress.step == 0:
        saver.save(progress)  # there must be something to go back to
        saver.finish()
        saver.save_again(progress)
        account.spent("save")
        _require_saved(store, progress)
    progress.ending, _ = preemption.agreed(mesh)
    profiler.before_first_step(progress)
    try:
        while _steps(progress, source, settings, mesh, executor, callbacks, recovery, times):
            saver.finish()
            signs.warm(False)
            signs.beat(progress.step, "going back to a checkpoint")
            progress = resume(built, lanes, store, fingerprints, source.cursor, adopt)
            progress.cursors = without(progress.cursors, recovery.places)
            cotangents.before_first_step(progress)
            profiler.before_first_step(progress)
            if monitor is not None:
                monitor.rewind(progress.step)
            account.spent("start-up")
            account.flush()
            account.start(progress.step)  # what was done beyond was in vain
            progress.ending, _ = preemption.agreed(mesh)
    except (RunError, StorageError):  # all ranks raise it alike; what is being written is of before, and sound
        saver.finish()
        raise
    unwritten = None if monitor is None else monitor.close()
    if board is not None:
        board.close()
    account.spent("other")
    account.flush()
    _require_saved(store, progress)
    if unwritten is not None:
        raise StorageError(f"{unwritten}. The checkpoint of step {progress.step} is saved")
    if progress.step < training.steps:
        raise StoppedError(f"stopped after step {progress.step} of {training.steps}, as asked; the next start goes on from there")
    if mesh.is_main:
        print(f"done: {progress.step} steps, {progress.tokens:,} tokens", flush=True)


class Times(NamedTuple):
    """Who is told what the run is doing and how far it is, step by step."""

    account: Account
    signs: heartbeat.Heartbeat
    board: LedgerBoard | None
    schedule: SaveSchedule


def _steps(
    progress: Progress,
    source: ShardSource | TaskSource,
    settings: RunSettings,
    mesh: Mesh,
    executor: StepExecutor,
    callbacks: Sequence[Callback],
    recovery: Recovery,
    times: Times,
) -> bool:
    """Steps from where the run stands, to its end (progress is then of there), or (True) until one makes it go back."""
    training, clock, every = settings.training, executor.clock, settings.training.monitoring.update_norm_every
    account, signs, board, schedule = times
    with open_stream(source, settings, mesh, progress) as stream:
        batches = batch_distribution.steps(stream, mesh, training, progress.step)
        new_shapes = {progress.step, *(first for first, _ in training.stretches)}
        account.spent("start-up")
        while progress.step < training.steps and not progress.ending:
            signs.warm(progress.step not in new_shapes)
            signs.beat(progress.step + 1, "data")
            clock.start()
            data = next(batches)
            clock.mark("data")
            account.spent("data")
            comm_timing.take_wait_seconds()
            executor.segments = data.segments
            executor.watch_update = bool(every) and (progress.step + 1) % every == 0
            result = executor.step(data.batches, learning_rates(progress.step, training), data.consumed)
            bad = result.refused is not None
            if bad and recovery.respond(result, progress.step, progress.cursors, data, stream) == "rollback":
                account.spent("compute")
                return True
            progress.advance(training.at(progress.step).global_batch_tokens, data.cursors)
            progress.ending, progress.waited = preemption.agreed(mesh, data.waited)
            account.spent("compute")
            account.move("compute", "exchange", comm_timing.take_wait_seconds())
            due = schedule.due(progress.step, ending=progress.ending)
            signs.warm()
            for callback in callbacks:
                name = type(callback).__name__ if callback.time_is == "other" else callback.time_is
                signs.beat(progress.step, name, slow=isinstance(callback, Profiler))
                callback.after_step(progress, result)
                account.spent(callback.time_is)
            account.done(progress.step, write=due)
            if due and board is not None:
                board.show(progress.step)
                account.spent("other")
    return False


def record_changes(settings: RunSettings, step: int, mesh: Mesh) -> None:
    """Write into events.jsonl that the run goes on with other settings after `step` steps."""
    Events(settings.folder, mesh.is_main).write("change", step, settings=settings.changed)
    if mesh.is_main:
        shown = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in settings.changed.items())
        print(f"from here on with other settings: {shown}", flush=True)


def _require_saved(store: CheckpointStore, progress: Progress) -> None:
    """Raise StorageError, on all ranks, when the run ends here and its last save has failed."""
    if store.problem is not None:
        last = newest(store.folder)
        kept = "no checkpoint is there" if last is None else f"the newest checkpoint is {last.name}"
        raise StorageError(
            f"{store.folder}: step {progress.step} could not be saved ({store.problem}), and {kept}; make room, then start again: "
            f"the run goes on from there"
        )


def _say_where(built: Built) -> None:
    """From now on each mixer's forward pass is a sign of life that names its layer."""

    def say(mixer: Any, inputs: Any) -> None:
        heartbeat.own().at(f"in {mixer.where}")

    for module in built.model.modules():
        if isinstance(module, Mixer):
            module.register_forward_pre_hook(say)


def begin_with(built: Built, path: Path) -> None:
    """Give the model somebody's weights. Raises CheckpointError."""
    load_weights(path, optimizer_rectangles(built.model, built.engine, built.mesh, for_save=False))
    built.engine.masters_changed()
    drop_cast_weights(built.model)
    if built.mesh.is_main:
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
    source: ShardSource | TaskSource, settings: RunSettings, mesh: Mesh, progress: Progress
) -> AbstractContextManager[Steps[Any] | None]:
    """This rank's stream of batches from where the run stands; None on ranks that receive instead of reading."""
    if not batch_distribution.reads(mesh):
        return nullcontext()
    training = settings.training
    plan = batch_distribution.plan(training, mesh, progress.step, settings.data.prefetch)
    return source.stream(plan, seed=training.seed, cursors=progress.cursors or None)


def resume(
    built: Built,
    lanes: LaneStates | None,
    store: CheckpointStore,
    fingerprints: dict[str, str],
    cursor: Callable[[dict[str, Any]], Any],
    adopt: Callable[[Manifest], None] = lambda manifest: None,
) -> Progress:
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
        return Progress(0, 0, {})
    path, manifest = found
    rectangles = optimizer_rectangles(built.model, built.engine, built.mesh, for_save=False)
    if lanes is not None:
        if any(key.startswith(CARRIED) for key in manifest.tensors):
            rectangles |= lanes.rectangles(for_save=False)
        else:  # a fork that begins its data anew
            lanes.clear()
    store.read(path, rectangles)
    built.engine.updates = manifest.adam_steps
    built.engine.masters_changed()
    drop_cast_weights(built.model)
    mesh = built.mesh
    cursors = {int(j): cursor(c) for j, c in manifest.cursors.items() if int(j) % mesh.layout.data == mesh.data_rank}
    if mesh.is_main:
        print(f"resuming from {path.name} ({manifest.tokens:,} tokens)", flush=True)
        changed = [
            f"{name} {manifest.versions[name]} -> {v}" for name, v in versions().items() if manifest.versions.get(name, v) != v
        ]
        if changed:
            print(f"since {path.name}: {', '.join(changed)}; what is computed is the same but for its last bits", flush=True)
    return Progress(manifest.step, manifest.tokens, cursors)


def _greeting(settings: RunSettings, parameters: int, mesh: Mesh, progress: Progress) -> str:
    training = settings.training
    sizes = ", ".join(f"{name} {n}" for name, n in mesh.layout.sizes().items() if name == "zero" or n > 1)
    return (
        f"{parameters:,} parameters; {mesh.world_size} rank(s) on {mesh.device.type} ({sizes}); "
        f"{training.global_batch_tokens:,} tokens per step, sequence length {training.sequence_length:,}; "
        f"step {progress.step} of {training.steps}"
    )
