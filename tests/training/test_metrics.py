"""metrics.jsonl is continuous over restarts, and complete after the disk was full."""

import json
import math
import shutil

import matplotlib.pyplot as plt
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams import plugin_data_pb2

from baton.training.monitoring import metrics as monitors
from baton.training.monitoring.metrics import MetricsLogger, format_duration, read_metrics, truncate_metrics
from baton.training.monitoring.plots import curves
from baton.training.monitoring.step_timer import StepSpans


def open_monitor(folder, step=0):
    return MetricsLogger(folder, step=step, total_steps=1000, log_every=1000, config_text="name: test")


SPANS = StepSpans([("", 0.0), ("data", 0.0), ("forward", 1.0), ("backward", 3.0), ("optimizer", 3.5)])


class LaterSpans(StepSpans):
    """Of a GPU that has not come to the end of its step."""

    def __init__(self):
        super().__init__(SPANS._marks)
        self.waited = False

    def are_known(self):
        return self.waited

    def seconds(self):
        self.waited = True
        return super().seconds()


def row(step, loss=None):
    loss = float(step) if loss is None else loss
    return {"step": step, "tokens": step * 10, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "step_tokens": 10,
            "memory_bytes": 2**30}  # fmt: skip


def shown(folder, tag="train/loss"):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)], events.Tags()


def recorded(folder):
    return [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


def test_a_restart_leaves_no_gap_and_no_overlap(tmp_path):
    first = open_monitor(tmp_path)
    for step in range(1, 8):
        first.log_step(row(step), SPANS)
    first.log_evaluation(5, 50, 2.0, 1.0, "text")
    first.close()  # the run is killed here; its last checkpoint is of step 4
    second = open_monitor(tmp_path, step=4)
    for step in range(5, 11):
        second.log_step(row(step, loss=step + 0.5), SPANS)
    second.log_evaluation(10, 100, 1.5, 0.9, "better text")
    second.close()
    expected = [(step, float(step) if step <= 4 else step + 0.5) for step in range(1, 11)]
    assert recorded(tmp_path) == expected
    assert shown(tmp_path)[0] == expected
    assert shown(tmp_path, "validation/bits_per_byte")[0] == [(10, pytest.approx(0.9))]
    assert {"config/text_summary", "sample/text_summary"} <= set(shown(tmp_path)[1]["tensors"])


WRITTEN_FIRST = {
    "when there is time": lambda metrics: metrics.write_measured(),
    "before a checkpoint": lambda metrics: metrics.flush(),
    "before an evaluation": lambda metrics: metrics.log_evaluation(1, 10, 2.0, 1.0, None),
    "before the next step": lambda metrics: metrics.log_step(row(2), SPANS),
    "at the end": lambda metrics: metrics.close(),
}


@pytest.mark.parametrize("then", WRITTEN_FIRST.values(), ids=WRITTEN_FIRST)
def test_a_row_waits_for_the_times_of_its_step_and_is_written_before_all_else(tmp_path, then):
    """Between two steps a GPU is not waited for."""
    metrics, spans = open_monitor(tmp_path), LaterSpans()
    metrics.log_step(row(1), spans)
    assert recorded(tmp_path) == []
    assert not spans.waited
    then(metrics)
    first = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (first["kind"], first["step"]) == ("train", 1)
    assert first["seconds"] == {"data": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5}


def test_going_back_cuts_off_a_row_that_waits(tmp_path):
    metrics = open_monitor(tmp_path)
    metrics.log_step(row(1), SPANS)
    metrics.log_step(row(2), LaterSpans())
    metrics.rewind(1)
    metrics.log_step(row(2, loss=7.0), SPANS)
    metrics.close()
    assert recorded(tmp_path) == [(1, 1.0), (2, 7.0)]


@pytest.mark.parametrize("skew", [-600, 0, 86400])
def test_a_restart_under_another_clock_leaves_no_gap_and_no_overlap_either(tmp_path, monkeypatch, skew):
    """Three starts: the second on a machine whose clock differs."""
    clock = monitors.time.time
    for number, ahead in enumerate((0, skew, 0)):
        monkeypatch.setattr(monitors.time, "time", lambda ahead=ahead: clock() + ahead)
        metrics = open_monitor(tmp_path, step=4 * number)
        for step in range(4 * number + 1, 4 * number + 8):
            metrics.log_step(row(step, loss=step + number / 4), SPANS)
        metrics.close()
    expected = [(step, step + min((step - 1) // 4, 2) / 4) for step in range(1, 16)]
    assert recorded(tmp_path) == expected
    assert shown(tmp_path)[0] == expected
    files = list((tmp_path / "tensorboard").glob("events*"))
    assert len(files) == 3, "nothing is lost"


def test_a_restart_from_the_beginning_shows_the_configuration_once(tmp_path):
    for _ in range(2):  # the first start is killed before it has saved a checkpoint
        metrics = open_monitor(tmp_path)
        metrics.log_step(row(1), SPANS)
        metrics.close()
    assert shown(tmp_path)[0] == [(1, 1.0)]
    board = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()  # TensorBoard's own reader: the other one keeps texts from before a restart
    assert [event.step for event in board.Tensors("config/text_summary")] == [0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer thread, as expected
def test_a_full_disk_delays_the_record_and_loses_nothing_of_it(small_disk, capsys):
    metrics = open_monitor(small_disk)
    for step in range(1, 6):
        metrics.log_step(row(step), SPANS)
    metrics.flush()
    ballast = small_disk / "ballast"
    size = shutil.disk_usage(small_disk).total
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(b"x" * size)
    for step in range(6, 60):
        metrics.log_step(row(step), SPANS)
    metrics.flush()
    assert recorded(small_disk)[-1][0] < 59, "the disk was not full"
    assert all(json.loads(line) for line in (small_disk / "metrics.jsonl").read_text().splitlines()), "half a row"
    ballast.unlink()
    for step in range(60, 65):
        metrics.log_step(row(step), SPANS)
    metrics.close()
    expected = [(step, float(step)) for step in range(1, 65)]
    assert recorded(small_disk) == expected
    assert shown(small_disk)[0] == expected
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl is behind") == 1
    assert "TensorBoard is behind" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer thread, as expected
def test_rows_that_could_not_be_written_to_the_end_are_named(small_disk, monkeypatch):
    metrics = open_monitor(small_disk)
    metrics.log_step(row(1), SPANS)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(b"x" * shutil.disk_usage(small_disk).total)
    for step in range(2, 30):
        metrics.log_step(row(step), SPANS)
    monkeypatch.setattr(monitors.time, "sleep", lambda seconds: None)
    written = len(recorded(small_disk))
    missing = f"{small_disk / 'metrics.jsonl'}: its last {29 - written} rows could not be written (No space left on device)"
    assert metrics.close() == missing
    monkeypatch.setattr(monitors.time, "sleep", lambda seconds: ballast.unlink(missing_ok=True))
    assert metrics.close() is None, "there is room at a later try"
    assert [step for step, _ in recorded(small_disk)] == list(range(1, 30))


def test_a_torn_last_line_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("damage", [b'{"ste', b"\0" * 4096, b"\xff\xfe", b"12"], ids=["cut", "zeros", "no text", "no row"])
def test_a_damaged_line_costs_no_other(tmp_path, damage):
    """A file system that comes back after a crash may have blocks of zeros where something was being written."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n{"step": 3}\n')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_credit_that_could_not_be_asked_is_said_and_not_recorded(tmp_path, capsys):
    metrics = open_monitor(tmp_path)
    metrics.log_gradient_reach(5, 50, None)
    norms = {"mamba": {"0": [0.0, 1.0], "1": [0.5, 1.0]}}
    metrics.log_gradient_reach(10, 100, {"span": 8, "boundaries": [1, 2], "norms": norms, "reach": {"mamba": {"0": 0, "1": 8}}})
    metrics.close()
    [recorded] = read_metrics(tmp_path / "metrics.jsonl")
    assert (recorded["kind"], recorded["step"]) == ("gradient_reach", 10)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step 5  gradient reach is not known")
    assert said[1] == "step 10  gradient reach in tokens, at most 8  mamba 0 to 8"
    assert shown(tmp_path, "gradient_reach_tokens/mamba/layer_1")[0] == [(10, 8.0)]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (61, "1m01s"), (3600, "1h00m00s"), (7325, "2h02m05s")])
def test_durations_are_readable(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("scale", "norms"), [(1, (0.031, 0.037)), (10**7, (2.5, 7.1))])
def test_labels_of_a_plot_do_not_overlap(tmp_path, scale, norms):
    metrics = open_monitor(tmp_path)
    for step in range(1, 21):
        metrics.log_step(
            row(step) | {"tokens": step * 131 * scale, "grad_norm": norms[step % 2], "lr": 1.5e-4 + step * 1e-9}, SPANS
        )
        if step % 10 == 0:
            metrics.log_evaluation(step, step * 131 * scale, 1.0 / step, 1e-4, None)
    metrics.close()
    figure = curves(tmp_path)
    figure.canvas.draw()
    texts = []
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_visible()):
        ticks = axis._update_ticks()  # those that are drawn: the others are beyond the axis
        texts += [axis.label, axis.get_offset_text(), *(label for tick in ticks for label in (tick.label1, tick.label2))]
    boxes = [(text, text.get_window_extent()) for text in texts if text.get_visible() and text.get_text()]
    assert len(boxes) > 40
    inside = figure.bbox.padded(1)
    for number, (text, box) in enumerate(boxes):
        assert inside.contains(box.x0, box.y0), text
        assert inside.contains(box.x1, box.y1), text
        for other, its in boxes[:number]:
            assert not box.overlaps(its), (text, other)
    plt.close(figure)


def test_the_custom_panel_and_the_settings_are_there_for_tensorboard(tmp_path):
    """Read as its plugins read them. The run is one entry: nothing is written beside the folder's own events."""
    config = "name: test\ntraining:\n  optimizer: {lr: 0.1, betas: [0.9, 0.95]}\n  bptt: null\n"
    metrics = MetricsLogger(tmp_path, step=0, total_steps=10, log_every=10, config_text=config, mfu_per_token_rate=1e-6)
    metrics.log_step({**row(1, loss=2.0), "update_norm": 0.5}, SPANS)
    metrics.log_evaluation(1, 10, 1.0, 0.5, None)
    metrics.show_scalars(1, {"goodput/of_all_time": 0.9})
    metrics.close()
    assert [path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == []
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    tags = set(events.Tags()["tensors"])
    (content,) = events.Tensors(custom_scalars.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(content.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Training", "Time", "Layout"]
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert list(charts)[:2] == ["loss, nats per token", "perplexity"]
    of_training = {tag for chart in layout.category[0].chart for tag in chart.multiline.tag}
    assert of_training <= tags, "every curve of the first category has values"
    plugin = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(plugin).session_start_info
    found = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert found == {"name": "test", "training.optimizer.lr": 0.1, "training.optimizer.betas": "[0.9, 0.95]"}
    assert shown(tmp_path, "train/perplexity")[0] == [(1, pytest.approx(math.exp(2.0)))]
    (recorded_row,) = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "train"]
    assert recorded_row["mfu"] == pytest.approx(1e-6 * recorded_row["tokens_per_s"])
