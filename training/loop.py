"""The loop of a run: resume if there is something to resume, then steps, with everything optional hung on as callbacks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil

from baton.data_pipeline.source import ShardSource, TaskSource, open_source
from baton.data_pipeline.steps import Steps
from baton.parallel import waiting
from baton.parallel.mesh import Mesh
from baton.parallel.tensor import drop_compute_copies
from baton.training import feed, stopping
from baton.training.build import Built, build, make_deterministic, model_fingerprint
from baton.training.callbacks import (
    CotangentNorms,
    Evaluator,
    LongContext,
    Recorder,
    ReplicaCheck,
    Saver,
    TaskEvaluator,
    save_is_due,
)
from baton.training.checkpoint.manifest import Manifest, versions
from baton.training.checkpoint.rectangles import optimizer_rectangles
from baton.training.checkpoint.store import CheckpointStore
from baton.training.clock import StepClock
from baton.training.config import with_vocabulary
from baton.training.doctor import check_kernels
from baton.training.errors import CheckpointError, StoppedError
from baton.training.executor import StepExecutor
from baton.training.heartbeat import Heartbeat
from baton.training.lane_states import LaneStates
from baton.training.ledger import Account
from baton.training.ledger_board import LedgerBoard
from baton.training.monitor import Monitor
from baton.training.run import Callback, Progress, RunSettings
from baton.training.schedule import learning_rates


def train(settings: RunSettings, mesh: Mesh) -> None:
    """Train to the last step, from the newest whole checkpoint if there is one. Every rank calls it.

    Raises StoppedError when it was asked to end before: what was done is saved.
    """
    training = settings.training
    heartbeat = Heartbeat(mesh.rank)
    heartbeat.beat(0, "start-up")
    began = psutil.Process().create_time()
    account = Account(settings.folder, settings.attempt, on=mesh.is_main, since=began)
    training.check(mesh.layout.data)
    make_deterministic(training)
    source = open_source(settings.data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    config = with_vocabulary(settings.model, source.vocab_size, tokenizer)
    built = build(config, training, mesh)
    store = CheckpointStore(settings.folder / "checkpoints", mesh, training.checkpoint.keep_last)
    stream_digest = source.fingerprint(seed=training.seed, lanes=training.lane_count)
    fingerprints = {"model": model_fingerprint(config), "stream": stream_digest}
    lanes = LaneStates(built.model, training, mesh) if training.carries else None
    if lanes is not None:
        fingerprints["set of carried States"] = f"{training.lane_count} lanes"
    progress = resume(built, lanes, store, fingerprints, source.cursor)
    if progress.step >= training.steps:
        if mesh.is_main:
            print(f"already complete: {progress.step} steps, {progress.tokens:,} tokens; there is nothing to do", flush=True)
        return
    account.start(progress.step)
    account.spent("start-up")
    if mesh.device.type == "cuda":  # on a CPU there are no kernels of our own, and nothing is compiled for the machine
        heartbeat.beat(0, "compile")
        check_kernels(built, training)
    account.spent("compile")
    replica_check = ReplicaCheck(built, training)
    replica_check.before_first_step(progress)
    monitor, parameters = None, built.parameter_count()
    if mesh.is_main:
        print(_greeting(settings, parameters, mesh, progress), flush=True)
        monitor = Monitor(
            settings.folder,
            step=progress.step,
            total_steps=training.steps,
            log_every=training.log_every,
            config_text=settings.config_text,
        )
    ledger_board = LedgerBoard(settings.folder, progress.step) if mesh.is_main else None
    clock = StepClock(mesh.device, lambda part: heartbeat.beat(progress.step + 1, part))
    executor = StepExecutor(built.model, built.engine, mesh, clock, lanes=lanes)
    evaluator: Callback
    if isinstance(source, ShardSource):
        evaluator = Evaluator(built, source, monitor, settings)
    else:
        evaluator = TaskEvaluator(built, source, monitor, settings)
    cotangents = CotangentNorms(built, monitor, training)
    cotangents.before_first_step(progress)
    callbacks: Sequence[Callback] = [
        Recorder(monitor, clock, training, mesh),
        replica_check,
        evaluator,
        LongContext(built, source, monitor, settings),
        cotangents,
        Saver(built, lanes, store, monitor, fingerprints, training),
    ]
    progress.ending = stopping.agreed(mesh)
    with open_stream(source, settings, mesh, progress) as stream:
        batches = feed.steps(stream, mesh, training, progress.step)
        account.spent("start-up")
        while progress.step < training.steps and not progress.ending:
            clock.start()
            data = next(batches)
            clock.mark("data")
            account.spent("data")
            waiting.seconds()
            executor.segments = data.segments
            result = executor.step(data.batches, learning_rates(progress.step, training))
            tokens = progress.tokens + training.global_batch_tokens
            progress = Progress(progress.step + 1, tokens, data.cursors, ending=stopping.agreed(mesh))
            account.spent("compute")
            account.move("compute", "exchange", waiting.seconds())
            for callback in callbacks:
                heartbeat.beat(progress.step, type(callback).__name__)
                callback.after_step(progress, result)
                account.spent(callback.time_is)
            due = save_is_due(progress, training)
            account.done(progress.step, write=due)
            if due and ledger_board is not None:
                ledger_board.show(progress.step)
                account.spent("other")
    if monitor is not None:
        monitor.close()
    if ledger_board is not None:
        ledger_board.close()
    account.spent("other")
    account.flush()
    if progress.step < training.steps:
        raise StoppedError(f"stopped after step {progress.step} of {training.steps}, as asked; the next start goes on from there")
    if mesh.is_main:
        print(f"done: {progress.step} steps, {progress.tokens:,} tokens", flush=True)


def open_stream(
    source: ShardSource | TaskSource, settings: RunSettings, mesh: Mesh, progress: Progress
) -> AbstractContextManager[Steps[Any] | None]:
    """This rank's stream of batches from where the run stands; None on ranks that receive instead of reading."""
    if not feed.reads(mesh):
        return nullcontext()
    training = settings.training
    plan = feed.plan(training, mesh, progress.step, settings.data.prefetch)
    return source.stream(plan, seed=training.seed, cursors=progress.cursors or None)


def resume(
    built: Built,
    lanes: LaneStates | None,
    store: CheckpointStore,
    fingerprints: dict[str, str],
    cursor: Callable[[dict[str, Any]], Any],
) -> Progress:
    """Load the newest whole checkpoint into the engine and the lanes; without any, the run stands at its beginning.

    cursor: makes a lane's cursor of its JSON.
    """

    def accept(manifest: Manifest) -> None:
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
    store.read(path, rectangles | ({} if lanes is None else lanes.rectangles(for_save=False)))
    built.engine.updates = manifest.adam_steps
    built.engine.masters_changed()
    drop_compute_copies(built.model)
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
        f"{training.global_batch_tokens:,} tokens per step, context {training.context:,}; step {progress.step} of {training.steps}"
    )
