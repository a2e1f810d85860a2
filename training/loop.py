"""The training loop: resume, steps with the callbacks after each, and going back to a checkpoint after an anomaly."""

from contextlib import suppress
from functools import partial

from baton.data_pipeline.errors import StorageError
from baton.parallel import comm_timing
from baton.parallel.mesh import Mesh
from baton.training import preemption
from baton.training.errors import RunError, StoppedError
from baton.training.lr_schedule import learning_rates
from baton.training.monitoring import heartbeat
from baton.training.monitoring.goodput_tensorboard import show_goodput
from baton.training.monitoring.time_ledger import TimeLedger, process_start_time
from baton.training.run import RunSettings
from baton.training.run_setup import Run, RunClocks, open_stream, prepare_run
from baton.training.step import batch_distribution
from baton.training.step.executor import StepResult


def train(settings: RunSettings, mesh: Mesh) -> None:
    """Train to the last step, from the newest whole checkpoint if there is one. Every rank calls it.

    Raises:
        StoppedError: the run was asked to stop before its last step; all steps that were made are saved.
        StorageError: the last checkpoint, or the last rows of metrics.jsonl, could not be written at several tries.
        RunError, CheckpointError, DataError: the run cannot start, or was stopped by training.guard.
    """
    beats = heartbeat.own_heartbeat()
    beats.beat(0, "start-up")
    ledger = TimeLedger(settings.folder, settings.attempt, enabled=mesh.is_main, since=process_start_time())
    run = prepare_run(settings, mesh, RunClocks(ledger, beats))
    if run is None:
        return
    ledger.charge("start-up")
    for callback in run.callbacks:
        callback.on_train_start(run.progress)
        ledger.charge(callback.time_category)
    run.progress.stop_requested, _ = preemption.sync_stop_request(mesh)
    try:
        while _train_steps(run):
            _roll_back(run)
        for callback in run.callbacks:
            callback.on_train_end(run.progress)
    except (RunError, StorageError):  # raised on all ranks alike; a checkpoint being written is of before, and sound
        run.checkpoint_callback.finish()
        raise
    finally:
        if run.metrics is not None:
            with suppress(RuntimeError):  # a GPU that has failed does not say when it did what
                run.metrics.write_measured()
    run.executor.close()
    _finish(run)


def _train_steps(run: Run) -> bool:
    """Make steps to the end of the run or of this start; True if an anomaly asks for a rollback before."""
    training, progress, executor, timer = run.settings.training, run.progress, run.executor, run.executor.timer
    ledger, beats = run.clocks.ledger, run.clocks.heartbeat
    update_norm_every = training.monitoring.update_norm_every
    with open_stream(run.source, run.settings, run.mesh, progress) as stream:
        batches = batch_distribution.StepReader(stream, run.mesh, training, progress.step)
        new_shapes = {progress.step, *(first for first, _ in training.phases)}
        ledger.charge("start-up")
        while progress.step < training.steps and not progress.stop_requested:
            beats.set_warm(progress.step not in new_shapes)
            beats.beat(progress.step + 1, "data")
            timer.start()
            data = next(batches)
            timer.mark("data")
            ledger.charge("data")
            comm_timing.take_wait_seconds()
            executor.schedule = data.schedule
            executor.compute_update_norm = bool(update_norm_every) and (progress.step + 1) % update_norm_every == 0
            more = progress.step + 1 < training.steps
            rates = learning_rates(progress.step, training)
            result = executor.step(data.batches, rates, data.checksum, partial(_while_passes_run, run, batches, more))
            bad = result.anomaly is not None
            if bad and run.recovery.respond(result, progress.step, progress.cursors, data, stream) == "rollback":
                ledger.charge("compute")
                return True
            progress.advance(training.at(progress.step).global_batch_tokens, data.cursors)
            progress.stop_requested, progress.data_wait_s = preemption.sync_stop_request(run.mesh, data.wait_s)
            ledger.charge("compute")
            ledger.reassign("compute", "exchange", comm_timing.take_wait_seconds())
            _after_step(run, result)
    return False


def _while_passes_run(run: Run, batches: batch_distribution.StepReader, more: bool) -> None:
    """What the host does before it waits for a GPU. more: another step follows."""
    if run.metrics is not None:
        run.metrics.write_measured()
    if more:
        batches.prepare()


def _after_step(run: Run, result: StepResult) -> None:
    """All callbacks, and the row of the time ledger."""
    progress, ledger, beats = run.progress, run.clocks.ledger, run.clocks.heartbeat
    save_due = run.schedule.due(progress.step, stop_requested=progress.stop_requested)
    beats.set_warm()
    for callback in run.callbacks:
        name = type(callback).__name__ if callback.time_category == "other" else callback.time_category
        beats.beat(progress.step, name, slow=callback.slow)
        callback.after_step(progress, result)
        ledger.charge(callback.time_category)
    ledger.step_done(progress.step, write=save_due)
    if save_due and run.metrics is not None:
        show_goodput(run.settings.folder, run.metrics, progress.step)
        ledger.charge("other")


def _roll_back(run: Run) -> None:
    """Go back to the newest checkpoint, without the documents that caused the anomaly."""
    ledger, beats = run.clocks.ledger, run.clocks.heartbeat
    run.checkpoint_callback.finish()
    beats.set_warm(False)
    beats.beat(run.progress.step, "going back to a checkpoint")
    run.resume()
    run.progress.cursors = run.recovery.without_documents(run.progress.cursors)
    for callback in run.callbacks:
        callback.on_rollback(run.progress)
    if run.metrics is not None:
        run.metrics.rewind(run.progress.step)
    ledger.charge("start-up")
    ledger.flush()
    ledger.start(run.progress.step)  # later steps were lost
    run.progress.stop_requested, _ = preemption.sync_stop_request(run.mesh)


def _finish(run: Run) -> None:
    """Close all records. Raises StorageError if one could not be written, StoppedError if steps are left."""
    progress, steps = run.progress, run.settings.training.steps
    unwritten = None if run.metrics is None else run.metrics.close()
    run.clocks.ledger.charge("other")
    run.clocks.ledger.flush()
    run.checkpoint_callback.require_saved(progress)
    if unwritten is not None:
        raise StorageError(f"{unwritten}. The checkpoint of step {progress.step} is saved")
    if progress.step < steps:
        raise StoppedError(f"stopped after step {progress.step} of {steps}, as asked; the next start goes on from there")
    if run.mesh.is_main:
        print(f"done: {progress.step} steps, {progress.tokens:,} tokens", flush=True)
