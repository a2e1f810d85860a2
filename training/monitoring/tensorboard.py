"""TensorBoard as a view of metrics.jsonl: every row becomes scalars, texts and images; goodput and layout are beside them.

The panel "Custom Scalars" has loss, perplexity, learning rate, norms and speed first, then goodput and the layout. "HParams" has
the run's settings, by which runs of one folder are compared.

TensorBoard's event writer works in its own thread and reports a full disk late or never. So rows are kept until a flush has
succeeded, and a failed writer is replaced by a new one that writes them again.
"""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.data_pipeline.own_yaml import parse_own_yaml

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

GIB = 2**30

CHARTS: dict[str, dict[str, list[str]]] = {
    "Training": {
        "loss, nats per token": ["train/loss", "validation/loss"],
        "perplexity": ["train/perplexity", "validation/perplexity"],
        "learning rate": ["train/lr"],
        "gradient norm": ["train/grad_norm"],
        "update norm": ["train/update_norm"],
        "tokens per second": ["speed/tokens_per_s"],
        "MFU (6N)": ["speed/mfu"],
    },
    "Time": {
        "goodput": ["goodput/of_all_time", "goodput/of_time_on_nodes"],
        "share of time waiting for data": ["time/data_wait_share"],
        "memory, GiB": ["memory/GiB"],
    },
    "Layout": {"ranks": ["layout/data", "layout/tensor", "layout/pipeline", "layout/context"]},
}
"""Category -> chart -> tags of its curves, in the order in which the panel has them."""

_EVENTS = "events.out.tfevents."
_LONG_CONTEXT_KINDS = ("long_context", "state_gradients", "gradient_reach")


def open_writer(folder: Path, step: int) -> "SummaryWriter":
    """A writer that continues after `step`; step 0 holds the configuration. Raises OSError."""
    # only the main rank of a run writes any, and importing TensorBoard takes a fifth of a second
    from torch.utils.tensorboard import SummaryWriter

    _rename_newer(folder, int(time.time()))
    # purge_step makes TensorBoard drop what was written from that step on
    return SummaryWriter(str(folder), purge_step=step + 1 if step else 0)


def _rename_newer(folder: Path, now: int) -> None:
    """Rename event files that would sort after a new one.

    TensorBoard reads a folder's event files in the order of their names, which begin with the time. On a machine whose
    clock is behind, the new file would come first, and the old ones would override it.
    """
    named = [(file, *file.name[len(_EVENTS) :].partition(".")) for file in sorted(folder.glob(f"{_EVENTS}*"))]
    late = [(file, rest) for file, when, _, rest in named if when.isdigit() and int(when) >= now - 1]
    for number, (file, rest) in enumerate(late):
        file.rename(file.with_name(f"{_EVENTS}{now - 1:010d}.{number:06d}.{rest}"))


class TensorBoardWriter:
    """Event files of one run. step: steps done before; events of an earlier attempt after it are dropped."""

    def __init__(self, folder: Path, step: int, config_text: str) -> None:
        self._folder = str(folder)
        self._config_text = config_text
        self._safe_step = step
        self._pending_rows: list[dict[str, Any]] = []
        self._writer: SummaryWriter | None = None
        self._open()

    def _open(self) -> "SummaryWriter":
        writer = self._writer = open_writer(Path(self._folder), self._safe_step)
        if self._safe_step == 0:
            writer.add_text("config", f"```yaml\n{self._config_text}\n```", 0)
            _write_panels(writer, self._config_text)
        for row in self._pending_rows:
            _write_row(writer, row)
        return writer

    def add(self, row: dict[str, Any]) -> None:
        """Show a row of metrics.jsonl. Raises OSError if the disk refuses it; a later flush shows it then."""
        self._pending_rows.append(row)
        if self._writer is not None:
            try:
                _write_row(self._writer, row)
            except OSError:
                self._writer = None
                raise

    def flush(self) -> None:
        """Write everything so far to disk. Raises OSError if it does not fit; nothing is lost, and the call can be repeated."""
        try:
            (self._writer or self._open()).flush()
        except OSError:
            self._writer = None
            raise
        if self._pending_rows:
            self._safe_step = self._pending_rows[-1]["step"]
            self._pending_rows = []

    def close(self) -> None:
        """Flush, and end the writer's thread."""
        self.flush()
        if self._writer is not None:
            self._writer.close()


def _write_panels(writer: "SummaryWriter", config_text: str) -> None:
    """The custom layout, and the settings as hyperparameters of this very run (add_hparams would make a run of its own)."""
    from torch.utils.tensorboard.summary import hparams

    writer.add_custom_scalars(
        {title: {name: ["Multiline", tags] for name, tags in charts.items()} for title, charts in CHARTS.items()}
    )
    settings = dict(_flatten(parse_own_yaml(config_text)))
    events = writer.file_writer
    assert events is not None
    for summary in hparams(settings, {"train/loss": 0.0, "validation/loss": 0.0}):
        events.add_summary(summary)


def _flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Settings by their dotted names; lists as text, and none where there is no value."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(settings, bool | int | float | str):
        yield prefix, settings
    elif settings is not None:
        yield prefix, str(settings)


def _perplexity(loss: float) -> float:
    """exp(loss); infinite where it is too large to be written."""
    return math.exp(loss) if loss < 700 else math.inf


def _write_row(writer: "SummaryWriter", row: dict[str, Any]) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard.summary import scalar

    step, events = row["step"], writer.file_writer
    assert events is not None
    # one event of all: the writer opens and closes its file for each, and a step of a small model takes no longer than a few
    values = [value for tag, number in row_scalars(row) for value in scalar(tag, number).value]
    events.add_summary(Summary(value=values), step)
    if "sample" in row:
        writer.add_text("sample", f"```\n{row['sample']}\n```", step)
    if row["kind"] in _LONG_CONTEXT_KINDS:
        # importing matplotlib takes a second that most runs need not wait
        from baton.training.monitoring.long_context_plots import render_row

        writer.add_image(row["kind"], render_row(row), step, dataformats="HWC")


def row_scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of a row of metrics.jsonl."""
    if row["kind"] == "evaluation":
        for name in ("loss", "bits_per_byte", "accuracy"):
            if name in row:
                yield f"validation/{name}", row[name]
        yield "validation/perplexity", _perplexity(row["loss"])
        for case, results in row.get("cases", {}).items():
            for name, value in results.items():
                yield f"{name}/{case}", value
    elif row["kind"] == "scalars":
        yield from row["values"].items()
    elif row["kind"] in _LONG_CONTEXT_KINDS:
        yield from _long_context_scalars(row)
    else:
        yield from _train_scalars(row)


def _train_scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name in ("loss", "lr", "grad_norm", "update_norm"):
        if name in row:
            yield f"train/{name}", row[name]
    yield "train/perplexity", _perplexity(row["loss"])
    yield "speed/tokens_per_s", row["tokens_per_s"]
    if "mfu" in row:
        yield "speed/mfu", row["mfu"]
    yield "memory/GiB", row["memory_bytes"] / GIB
    for part, seconds in row["seconds"].items():
        yield f"time/{part}_s", seconds
    if "data_wait_s" in row:  # a run that began before this was recorded has rows without it
        yield "time/data_wait_share", row["data_wait_s"] / max(1e-9, sum(row["seconds"].values()))


def _long_context_scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of a row about long context.

    Each bucket's loss; each layer's State norm at the end of the rows; the State gradient at the first and last boundary;
    gradient reach.
    """
    if row["kind"] == "long_context":
        for bucket in row["losses"]:
            yield f"loss_by_position/from_{bucket['from']:07d}", bucket["loss"]
    tables = {"long_context": {"state_norm": ("states", -1)},
              "state_gradients": {"state_gradient_at_first_border": ("norms", 0), "state_gradient_at_last_border": ("norms", -1)},
              "gradient_reach": {}}  # fmt: skip
    for tag, (key, place) in tables[row["kind"]].items():
        for name, of_layer in row[key].items():
            for layer, norms in of_layer.items():
                if measured := [norm for norm in norms if norm is not None]:
                    yield f"{tag}/{name.replace(' ', '.')}/layer_{layer}", measured[place]
    for name, of_layer in row.get("reach", {}).items():
        for layer, tokens in of_layer.items():
            yield f"gradient_reach_tokens/{name.replace(' ', '.')}/layer_{layer}", tokens
