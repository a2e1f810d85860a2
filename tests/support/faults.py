"""Thirty realistic faults. Each is a small change of one file that a test of the quick suite must find.

`tests/planted_faults.py` plants them one at a time; `tests/test_architecture.py` checks that each can still be planted. Where a
change of the code takes away the text of a fault, give the fault the new text, or plant another one of its area in its place.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

AREAS = ("kernels", "carry", "cursor", "checkpoint", "schedule", "launcher")
"""Carry is the hand-over of States between ranks, segments and steps; launcher includes SLURM jobs and locks."""


@dataclass(frozen=True)
class Fault:
    """A change of one file that makes the code wrong.

    what: what goes wrong, for the table. before: text that is in the file exactly once; after: what takes its place. tests: what to
    run, in this order, until a test fails: arguments of pytest, each a file, or some of its tests and then the whole file.
    """

    name: str
    area: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def problem(self, tree: Path) -> str | None:
        """Why it cannot be planted in a source tree; None: it can."""
        path = tree / self.file
        count = path.read_text(encoding="utf-8").count(self.before) if path.exists() else 0
        if count != 1:
            return f"{self.file} has its text {count} times, not once:\n{self.before}"
        missing = [word for words in self.tests for word in paths(words) if not (tree / word).exists()]
        return f"there is no {missing[0]}" if missing else None

    def plant(self, tree: Path) -> None:
        """Change a source tree. Raises ValueError where `problem` says why."""
        if (why := self.problem(tree)) is not None:
            raise ValueError(f"{self.name}: {why}")
        path = tree / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.before, self.after), encoding="utf-8")


def paths(words: str) -> list[str]:
    """The files among the arguments of pytest."""
    return [word.partition("::")[0] for word in shlex.split(words) if word.startswith("tests/")]


FAULTS = (
    Fault(
        "border-decay",
        "kernels",
        "the first token's decay is left out where a cotangent crosses the border of two chunks",
        "kernels/diagonal_scan/chunked.py",
        "        next_decay_BND.copy_(decays[0])\n",
        "        next_decay_BND.fill_(1.0)\n",
        (
            "tests/kernels/test_selective_scan.py -k any_chunk_size",
            "tests/kernels/test_selective_scan.py",
            "tests/kernels/test_longhorn.py",
        ),
    ),
    Fault(
        "first-tap",
        "kernels",
        "Triton's convolution: no gradient reaches a document's first token through the taps behind it",
        "kernels/short_conv/triton_kernels.py",
        "to_past = tl.where(pos_s[s] >= W - 1 - i, g, 0.0)",
        "to_past = tl.where(pos_s[s] > W - 1 - i, g, 0.0)",
        ("tests/kernels/test_triton_conv.py -k definitions", "tests/kernels/test_triton_conv.py"),
    ),
    Fault(
        "slope-of-a-square",
        "kernels",
        "gated slot attention in Triton: the derivative of relu squared lacks its factor 2",
        "kernels/gated_slot_attention/triton_kernels.py",
        "d *= 2.0 * tl.maximum(x, 0.0)",
        "d *= tl.maximum(x, 0.0)",
        ("tests/kernels/test_triton_gla.py -k weights_and_strengths", "tests/kernels/test_triton_gla.py"),
    ),
    Fault(
        "recall-without-decay",
        "kernels",
        "delta rule in Triton: of tokens whose beta is 0, beta's gradient takes the entering state undecayed",
        "kernels/delta_rule/wy_backward_kernels.py",
        "- since[:, None] * recalled - earlier",
        "- recalled - earlier",
        ("tests/kernels/test_triton_delta.py -k definitions", "tests/kernels/test_triton_delta.py"),
    ),
    Fault(
        "oldest-fading-token",
        "kernels",
        "B'MOJO in Triton: the oldest of the fading tokens is not published where the document has no more",
        "kernels/eidetic_attention/topk_memory_kernels.py",
        "known = (publish_at < T) & (FADING - j <= publish_at + read)",
        "known = (publish_at < T) & (FADING - j < publish_at + read)",
        ("tests/kernels/test_triton_eidetic.py -k as_long_as", "tests/kernels/test_triton_eidetic.py"),
    ),
    Fault(
        "start-lets-through",
        "kernels",
        "Lattice: the cotangent goes on into the document before, although its slots were replaced at the start",
        "kernels/lattice/step_loop.py",
        "                dloaded += dS.masked_fill(~starts.mask[t], 0.0)\n                dS.masked_fill_(starts.mask[t], 0.0)\n",
        "                dloaded += dS.masked_fill(~starts.mask[t], 0.0)\n",
        (
            "tests/kernels/test_lattice_recurrence.py -k any_chunk_size",
            "tests/kernels/test_lattice_recurrence.py",
            "tests/kernels/test_law.py -k lattice",
        ),
    ),
    Fault(
        "padded-width",
        "kernels",
        "the norm's backward kernel takes the mean over the block's width and not over the row's",
        "kernels/rms_norm/triton_kernels.py",
        "along = tl.sum(dnormed * normed, 1) / D\n",
        "along = tl.sum(dnormed * normed, 1) / BD\n",
        ("tests/kernels/test_triton_norm.py -k torchs", "tests/kernels/test_triton_norm.py"),
    ),
    Fault(
        "start-in-a-piece",
        "kernels",
        "Mamba with zero-order hold in Triton: a document's start does not end what enters its piece of the sequence",
        "kernels/diagonal_scan/triton_forward.py",
        "total += first if RECURRENCE == MAMBA else tl.where(starts_document, FORGET_ALL, x_scale)",
        "total += first if RECURRENCE == MAMBA else x_scale",
        ("tests/kernels/test_triton_scan.py -k hold_is_the_definitions", "tests/kernels/test_triton_scan.py"),
    ),
    Fault(
        "gathered-backwards",
        "carry",
        "with gathered States, cotangents are folded in the order of the ranks and not against it",
        "parallel/state_passing.py",
        '            spans = wait()\n            if direction == "left":\n                spans.reverse()\n',
        "            spans = wait()\n",
        ("tests/parallel/test_context_parallel.py -k gathered_effects", "tests/parallel/test_context_parallel.py"),
    ),
    Fault(
        "taken-back-half-way",
        "carry",
        "a refused step leaves lanes with the States of its last group of segments but one",
        "training/bptt/lane_states.py",
        "if self._backup is not None and tuple(lanes) not in self._backup:",
        "if self._backup is not None:",
        (
            "tests/training/test_lane_states.py -k taken_back",
            "tests/training/test_anomalies.py -k skip",
            "tests/training/test_lane_states.py",
            "tests/training/test_anomalies.py",
            "tests/training/test_save_memory.py",
        ),
    ),
    Fault(
        "borrowed-cotangent",
        "carry",
        "what a leaving State's cotangent adds is written into a gradient that others read too",
        "parallel/state_passing.py",
        "                    grads[number] = grads[number].clone()\n",
        "",
        (
            "tests/parallel/test_context_parallel.py -k keep_their_bits",
            "tests/training/test_segments.py -k exact",
            "tests/parallel/test_context_parallel.py",
            "tests/training/test_state_gradients.py",
            "tests/training/test_grid.py",
        ),
    ),
    Fault(
        "segments-within-ranks",
        "carry",
        "a sequence over ranks and segments is cut rank by rank first, so that segments are not in the order of time",
        "training/step/batch_distribution.py",
        ".view(3, rows, segments, mesh.layout.context, -1)[:, :, :, mesh.context_rank]",
        ".view(3, rows, mesh.layout.context, segments, -1)[:, :, mesh.context_rank]",
        (
            "tests/training/test_long_context.py -k segments",
            "tests/training/test_long_context.py",
            "tests/launcher/test_segmented_run.py",
            "tests/launcher/test_synthetic_run.py",
        ),
    ),
    Fault(
        "state-not-taken",
        "carry",
        "the first sequence rank begins its next group of segments without what the last rank has sent",
        "training/step/microbatch_runner.py",
        "            return None\n        self._recv_wraparound()\n        link = self._context.link\n",
        "            return None\n        link = self._context.link\n",
        (
            "tests/training/test_segments.py -k truncated",
            "tests/training/test_lane_states.py",
            "tests/training/test_segments.py",
            "tests/launcher/test_segmented_run.py",
        ),
    ),
    Fault(
        "last-step-of-a-length",
        "cursor",
        "where the rows' number changes, the last step before is not counted, so lanes are out of turn",
        "data_pipeline/steps.py",
        "ends = ((phase, step if end is None else min(step, end)) for phase, end in self._phase_ranges())",
        "ends = ((phase, step if end is None else min(step, end - 1)) for phase, end in self._phase_ranges())",
        (
            "tests/data_pipeline/test_length_schedule.py",
            "tests/data_pipeline/test_lane_order.py",
            "tests/data_pipeline/test_token_accounting.py",
        ),
    ),
    Fault(
        "grown-source",
        "cursor",
        "of a source that has grown, earlier epochs are counted with the units that it has now",
        "data_pipeline/lane_order.py",
        "self._sizes[number:] = [(slot + (epoch - before) * size, epoch, count)]",
        "self._sizes[number:] = [(slot + (epoch - before) * count, epoch, count)]",
        (
            "tests/data_pipeline/test_mixture.py -k added",
            "tests/data_pipeline/test_mixture.py",
            "tests/data_pipeline/test_token_accounting.py",
        ),
    ),
    Fault(
        "cursors-run-ahead",
        "cursor",
        "a step's cursors are the reader's own, which go on with what is read ahead",
        "data_pipeline/reader.py",
        "        return dict(self._cursors)\n",
        "        return self._cursors\n",
        ("tests/data_pipeline/test_stream.py -k yielded", "tests/data_pipeline/test_stream.py"),
    ),
    Fault(
        "innocent-document",
        "cursor",
        "a rollback leaves out the document behind the one that did it, in rows that begin with a document",
        "training/monitoring/anomaly_recovery.py",
        "number = int((pos[: where.column + 1] == 0).sum()) - int(pos[0] == 0)",
        "number = int((pos[: where.column + 1] == 0).sum())",
        ("tests/training/test_anomalies.py -k leaves_out", "tests/training/test_anomalies.py"),
    ),
    Fault(
        "updates-of-one-group",
        "checkpoint",
        "a resumed run has the number of updates for the first group of parameters only; the others are corrected as if new",
        "parallel/zero.py",
        "        for counted in self.update_counts().values():\n            counted.fill_(float(count))\n",
        "        next(iter(self.update_counts().values())).fill_(float(count))\n",
        ("tests/training/test_checkpoint.py -k any_layout", "tests/training/test_replica_check.py", "tests/launcher/test_run.py"),
    ),
    Fault(
        "manifest-unchecked",
        "checkpoint",
        "a manifest's checksum of itself is not compared",
        "training/checkpoint/manifest.py",
        'if document["sha256"] != _digest(body):',
        'if not document["sha256"]:',
        (
            "tests/training/test_checkpoint.py -k damage",
            "tests/training/test_checkpoint.py",
            "tests/training/test_checkpoint_tools.py",
        ),
    ),
    Fault(
        "hole-in-a-tensor",
        "checkpoint",
        "a tensor whose parts do not cover it is loaded, with what was there before in between",
        "training/checkpoint/files.py",
        "if covered != box.data.numel():",
        "if covered > box.data.numel():",
        (
            "tests/training/test_checkpoint.py -k cover",
            "tests/training/test_lane_states.py -k refused",
            "tests/training/test_checkpoint.py",
            "tests/training/test_checkpoint_tools.py",
            "tests/launcher/test_fork.py",
        ),
    ),
    Fault(
        "save-overtaken",
        "checkpoint",
        "a save does not wait for the one that is being written, whose memory it uses",
        "training/checkpoint/store.py",
        "        self.finish()\n        self.problem = None\n",
        "        self.problem = None\n",
        ("tests/training/test_checkpoint.py -k while_a_checkpoint", "tests/training/test_checkpoint.py"),
    ),
    Fault(
        "stale-copies",
        "checkpoint",
        "after a rollback the first step in bfloat16 reads copies of the weights that were given up",
        "training/checkpoint/resume.py",
        "    train_state.engine.masters_changed()\n    drop_cast_weights(train_state.model)\n    mesh = train_state.mesh\n",
        "    train_state.engine.masters_changed()\n    mesh = train_state.mesh\n",
        (
            "tests/training/test_checkpoint.py -k going_back",
            "tests/training/test_anomalies.py -k leaves_out",
            "tests/training/test_checkpoint.py",
            "tests/launcher/test_run.py",
        ),
    ),
    Fault(
        "few-micro-batches",
        "schedule",
        "with fewer micro-batches than stages, some are never back-propagated",
        "parallel/pipeline.py",
        "ahead = min(stages - stage - 1, len(units))",
        "ahead = stages - stage - 1",
        ("tests/parallel/test_pipeline.py",),
    ),
    Fault(
        "labels-of-the-first",
        "schedule",
        "the loss is divided by the first micro-batch's labels times the number of micro-batches",
        "training/step/executor.py",
        "sums = torch.stack([b.count_labels() for b in batches]).sum().repeat(2)",
        "sums = (batches[0].count_labels() * len(batches)).repeat(2)",
        ("tests/training/test_equivalence.py -k labels", "tests/training/test_equivalence.py", "tests/training/test_grid.py"),
    ),
    Fault(
        "tokens-of-the-next-step",
        "schedule",
        "at a border of the batch ramp a step is recorded with the next step's tokens",
        "training/loop.py",
        "progress.advance(training.at(progress.step).global_batch_tokens, data.cursors)",
        "progress.advance(training.at(progress.step + 1).global_batch_tokens, data.cursors)",
        (
            "tests/training/test_equivalence.py -k by_hand",
            "tests/launcher/test_config.py -k ramp or warm",
            "tests/training/test_consumed_checksum.py -k plain_reading",
            "tests/launcher/test_segmented_run.py",
            "tests/launcher/test_run.py",
        ),
    ),
    Fault(
        "rate-one-step-late",
        "schedule",
        "each step is made with the learning rate of the step before",
        "training/loop.py",
        "rates = learning_rates(progress.step, training)",
        "rates = learning_rates(max(0, progress.step - 1), training)",
        (
            "tests/training/test_equivalence.py -k by_hand",
            "tests/launcher/test_fork.py -k grow or branches",
            "tests/launcher/test_fork.py",
            "tests/launcher/test_config.py",
            "tests/launcher/test_run.py",
        ),
    ),
    Fault(
        "number-used-again",
        "launcher",
        "a lock file whose process has ended is held for ever once another process has its number",
        "data_pipeline/lock.py",
        'return state in ("Z", "X") or began not in ("", record.get("began"))',
        'return state in ("Z", "X")',
        ("tests/data_pipeline/test_lock.py", "tests/launcher/test_refusals.py"),
    ),
    Fault(
        "one-node-is-done",
        "launcher",
        "a job of which one node has stopped early counts as done, because another one has done the last step",
        "slurm/outcome.py",
        "for s in (Exit.STOPPED, Exit.DONE)",
        "for s in (Exit.DONE, Exit.STOPPED)",
        ("tests/slurm/test_policy.py", "tests/slurm/test_begin.py", "tests/slurm/test_jobs.py"),
    ),
    Fault(
        "end-without-a-record",
        "launcher",
        "a start whose end could not be recorded has the exit status of a success",
        "launcher/run_directory.py",
        "return status or StorageError.exit_status",
        "return status",
        ("tests/launcher/test_failing_storage.py -k recorded", "tests/launcher/test_failing_storage.py"),
    ),
    Fault(
        "told-too-early",
        "launcher",
        "SIGTERM that comes while a rank imports kills it, and the run counts as failed",
        "launcher/ranks.py",
        "signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGTERM))",
        "signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))",
        (
            "tests/launcher/test_liveness.py -k signals",
            "tests/slurm/test_signals.py",
            "tests/launcher/test_run.py",
            "tests/launcher/test_failing_storage.py",
            "tests/slurm/test_jobs.py",
        ),
    ),
)
