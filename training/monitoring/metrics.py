"""A run's records: metrics.jsonl (the primary one), TensorBoard, W&B, and lines on the console.

All are continuous over restarts: a run that resumes at step s cuts off what an earlier attempt wrote after s, because it
writes those steps again.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.data_pipeline.errors import StorageError, error_reason, is_transient
from baton.data_pipeline.file_io import PAUSES_S
from baton.training.errors import RunError
from baton.training.monitoring.config import WandbConfig
from baton.training.monitoring.step_timer import StepSpans
from baton.training.monitoring.tensorboard import TensorBoardWriter
from baton.training.monitoring.wandb_writer import WandbWriter


class MetricsLogger:
    """Writes one run's records; only the main rank has one.

    folder: the run directory. step: steps done when this attempt starts. A full disk is reported and does not end the run:
    rows wait in memory until they fit. Only a start needs room, to cut off an earlier attempt's rows; it raises
    StorageError.
    mfu_per_token_rate: model FLOPs utilisation at one token a second; None: the device's peak is not known, and rows have no mfu.
    wandb: mirror the rows to W&B; None: do not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        total_steps: int,
        log_every: int,
        config_text: str,
        mfu_per_token_rate: float | None = None,
        wandb: WandbConfig | None = None,
    ) -> None:
        self._path = folder / "metrics.jsonl"
        self._folder, self._config_text = folder, config_text
        self._total, self._log_every, self._mfu = total_steps, log_every, mfu_per_token_rate
        self._waiting: list[str] = []
        try:
            truncate_metrics(self._path, step)
            self._tensorboard = TensorBoardWriter(folder / "tensorboard", step, config_text)
        except OSError as error:  # what was recorded before is as it was
            kind = StorageError if is_transient(error) else RunError
            raise kind(f"{folder}: the record cannot be written ({error.strerror}); make room, then start the run again") from None
        self._wandb = None if wandb is None else WandbWriter(folder, wandb, config_text, read_metrics(self._path))
        self._window: list[tuple[float, int]] = [(time.perf_counter(), 0)]
        self._unmeasured: tuple[dict[str, Any], StepSpans] | None = None
        self._behind: set[str] = set()
        self._problem = ""

    def log_step(self, row: dict[str, Any], spans: StepSpans) -> None:
        """A training step's row, written now if the times of its parts are known, else by `write_measured` or before anything else.

        row: {step, tokens, loss, lr, grad_norm, step_tokens, consumed: checksum of its tokens, labels and positions in
        their lanes (`batch_distribution.batch_checksum`), data_wait_s: of the rank that waited longest for data, memory_bytes}.
        """
        self.write_measured()
        now = time.perf_counter()
        self._window = [*self._window[-50:], (now, self._window[-1][1] + row["step_tokens"])]
        (then, before), (_, after) = self._window[0], self._window[-1]
        rate = (after - before) / max(1e-9, now - then)
        mfu = {} if self._mfu is None else {"mfu": self._mfu * rate}
        self._unmeasured = {"kind": "train", **row, "tokens_per_s": rate, **mfu, "time": time.time()}, spans
        if spans.are_known():
            self.write_measured()

    def write_measured(self) -> None:
        """Write the last step's row if that is not done, waiting for its times.

        Called when a GPU has other work to do meanwhile: between steps it would wait for the host.
        """
        if self._unmeasured is None:
            return
        (row, spans), self._unmeasured = self._unmeasured, None
        self._write({**row, "seconds": spans.seconds()})
        step, rate = row["step"], row["tokens_per_s"]
        if step % self._log_every == 0 or step == self._total:
            eta = (self._total - step) * row["step_tokens"] / rate
            print(
                f"step {step}/{self._total}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  grad norm {row['grad_norm']:.3f}  "
                f"{rate:,.0f} tokens/s  ETA {format_duration(eta)}",
                flush=True,
            )

    def log_evaluation(self, step: int, tokens: int, loss: float, bits_per_byte: float, sample: str | None) -> None:
        """A validation result: loss in nats per token, bits per byte of text, and a sample of generated text."""
        row = {"kind": "evaluation", "step": step, "tokens": tokens, "loss": loss, "bits_per_byte": bits_per_byte}
        if sample is not None:
            row["sample"] = sample
        self._write(row)
        print(f"step {step}  validation loss {loss:.4f} nats/token  {bits_per_byte:.4f} bits/byte", flush=True)
        self._restart_window()

    def log_task_evaluation(self, step: int, tokens: int, cases: dict[str, tuple[float, float]]) -> None:
        """A result on a synthetic task. cases: name to (loss in nats per label, accuracy from 0 to 1); their means are
        recorded too."""
        loss, accuracy = (sum(values) / len(cases) for values in zip(*cases.values()))
        named = {name: {"loss": of_case[0], "accuracy": of_case[1]} for name, of_case in cases.items()}
        self._write({"kind": "evaluation", "step": step, "tokens": tokens, "loss": loss, "accuracy": accuracy, "cases": named})
        shown = "  ".join(f"{name} {of_case[1]:.2%}" for name, of_case in cases.items())
        print(f"step {step}  validation loss {loss:.4f} nats/label  accuracy {accuracy:.2%}  ({shown})", flush=True)
        self._restart_window()

    def log_long_context(self, step: int, tokens: int, seen: dict[str, Any]) -> None:
        """Loss and norms of States by position: `LongContextResult.to_json`."""
        self._write({"kind": "long_context", "step": step, "tokens": tokens, **seen})
        shown = "  ".join(f"{bucket['from']:,}: {bucket['loss']:.4f}" for bucket in seen["losses"])
        print(f"step {step}  validation loss from position  {shown}", flush=True)
        self._restart_window()

    def log_state_gradients(self, step: int, tokens: int, seen: dict[str, Any]) -> None:
        """Norms of a step's State gradients: `StateGradients.to_json`."""
        self._write({"kind": "state_gradients", "step": step, "tokens": tokens, **seen})

    def log_gradient_reach(self, step: int, tokens: int, seen: dict[str, Any] | None) -> None:
        """How far the gradient of a few tokens' loss reaches back: StateGradients.to_json and reach; None: no row was long
        enough."""
        self.write_measured()
        if seen is None:
            print(
                f"step {step}  gradient reach is not known: no long row is a single document; decrease "
                f"training.evaluation.gradient_reach_segment_length or gradient_reach_segments",
                flush=True,
            )
            return
        self._write({"kind": "gradient_reach", "step": step, "tokens": tokens, **seen})
        shown = "  ".join(f"{name} {min(of.values()):,} to {max(of.values()):,}" for name, of in seen["reach"].items())
        whole = (seen["boundaries"][-1] - seen["boundaries"][0]) * seen["span"]
        print(f"step {step}  gradient reach in tokens, at most {whole:,}  {shown}", flush=True)
        self._restart_window()

    def log_scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """A callback's own values, by name: a row of kind "scalars", and a scalar each in TensorBoard."""
        self._write({"kind": "scalars", "step": step, "tokens": tokens, "values": dict(values)})

    def show_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values for TensorBoard alone, because another file of the run directory is their record."""
        self.write_measured()
        row = {"kind": "scalars", "step": step, "values": dict(values)}
        self._guard("TensorBoard", lambda: self._tensorboard.add(row))

    def log_profile(self, text: str) -> None:
        """Print the table of the profiled steps."""
        self.write_measured()
        print(text, flush=True)
        self._restart_window()

    def log_checkpoint(self, name: str, seconds: float, size: int, stall: float) -> None:
        """Print that a checkpoint was published, and send W&B the rows that it makes final. name: step-N. seconds: from its
        beginning to its end. size: bytes. stall: seconds for which training stopped."""
        self.write_measured()
        print(f"saved {name}: {size / 2**20:.1f} MiB in {seconds:.2f} s, of which training stood still {stall:.2f} s", flush=True)
        if self._wandb is not None:
            self._wandb.checkpoint_saved(int(name.removeprefix("step-")))
        self._restart_window()

    def flush(self) -> None:
        """Make all rows durable. Called before a checkpoint is published, so that no record is behind a checkpoint."""
        self.write_measured()
        self._guard("metrics.jsonl", lambda: self._append(sync=True))
        self._guard("TensorBoard", self._tensorboard.flush)

    def rewind(self, step: int) -> None:
        """The run goes on from `step` again: cut off all later rows, as on resuming."""
        self._close_files()
        self._waiting = [line for line in self._waiting if json.loads(line)["step"] <= step]
        truncate_metrics(self._path, step)
        self._tensorboard = TensorBoardWriter(self._folder / "tensorboard", step, self._config_text)
        if self._wandb is not None:
            self._wandb.restart([*read_metrics(self._path), *map(json.loads, self._waiting)])
        self._restart_window()

    def close(self) -> str | None:
        """Write waiting rows, at several tries if need be; returns why rows are missing in metrics.jsonl, or None."""
        missing = self._close_files()
        if self._wandb is not None:
            self._wandb.close()
        return missing

    def _close_files(self) -> str | None:
        self.flush()
        for pause in PAUSES_S:
            if not self._waiting:
                break
            time.sleep(pause)
            self.flush()
        self._guard("TensorBoard", self._tensorboard.close)
        if not self._waiting:
            return None
        return f"{self._path}: its last {len(self._waiting)} rows could not be written ({self._problem})"

    def _restart_window(self) -> None:
        """Restart the window of tokens_per_s, which counts training steps alone."""
        self._window = [(time.perf_counter(), 0)]

    def _write(self, row: dict[str, Any]) -> None:
        self.write_measured()
        self._waiting.append(json.dumps(row) + "\n")
        self._guard("metrics.jsonl", self._append)
        self._guard("TensorBoard", lambda: self._tensorboard.add(row))
        if self._wandb is not None:
            self._wandb.add(row)

    def _append(self, sync: bool = False) -> None:
        """Append all waiting rows or none: a write that did not fit is cut off again."""
        data = "".join(self._waiting).encode()
        with open(self._path, "ab", buffering=0) as f:
            whole = os.fstat(f.fileno()).st_size
            try:
                while data:
                    data = data[f.write(data) :]
                if sync:
                    os.fsync(f.fileno())
            except OSError:
                f.truncate(whole)
                raise
        self._waiting = []

    def _guard(self, what: str, work: Callable[[], None]) -> None:
        """Do some writing; report a disk that refuses it once, until it succeeds again."""
        try:
            work()
        except OSError as error:
            self._problem = error_reason(error)
            if what not in self._behind:
                print(f"{what} is behind ({error}); it is completed once there is room, the run goes on", flush=True)
            self._behind.add(what)
        else:
            self._behind.discard(what)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl. A line that was cut short or damaged is left out, and no other."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def truncate_metrics(path: Path, step: int) -> None:
    """Keep the rows up to `step`, atomically."""
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


def format_duration(seconds: float) -> str:
    """1h02m03s, 2m03s or 3s."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m{s:02d}s"
    return f"{minutes}m{s:02d}s" if minutes else f"{s}s"
