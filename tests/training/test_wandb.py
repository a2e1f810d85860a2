"""metrics.jsonl mirrored to Weights & Biases, with the real package in offline mode."""

import json
import struct
import time

import pytest

from baton.training.monitoring.config import WandbConfig
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.step_timer import StepSpans

OFFLINE = WandbConfig(project="baton-test", mode="offline")


def start(folder, step, config=OFFLINE):
    return MetricsLogger(folder, step=step, total_steps=100, log_every=100, config_text="name: test\nseed: 3", wandb=config)


def train(metrics, steps, loss):
    for step in steps:
        metrics.log_step({"step": step, "tokens": 10 * step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "step_tokens": 10,
                          "memory_bytes": 2**30}, StepSpans([("", 0.0), ("forward", 1.0)]))  # fmt: skip


def save(metrics, step):
    metrics.log_checkpoint(f"step-{step:08d}", 0.0, 0, 0.0)


def records(path):
    """W&B's records in a .wandb file, which has the format of LevelDB's logs: blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder):
    """(step, training loss) of all rows of all starts, and the ids of their W&B runs."""
    rows, ids = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        written = []
        deadline = time.monotonic() + 60
        while not written or written[-1].WhichOneof("record_type") != "exit":  # W&B's own process writes the file
            assert time.monotonic() < deadline, "W&B has not finished its file"
            time.sleep(0.05)
            written = list(records(path))
        for record in written:
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
                rows.append((row["step"], row["train/loss"]))
    return rows, ids


def test_crashes_and_rollbacks_neither_drop_nor_double_a_step(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    first = start(tmp_path, 0)
    train(first, range(1, 5), 1.0)
    save(first, 4)
    train(first, range(5, 8), 2.0)
    first.rewind(4)  # rolled back
    train(first, range(5, 7), 3.0)
    save(first, 6)
    train(first, range(7, 9), 4.0)
    first.close()  # steps 7 and 8 are in no checkpoint
    second = start(tmp_path, 6)
    train(second, range(7, 10), 5.0)
    save(second, 9)
    second.close()
    rows, ids = history(tmp_path)
    losses = [1.0] * 4 + [3.0] * 2 + [5.0] * 3
    assert rows == list(zip(range(1, 10), losses))
    assert len(ids) == 1


def test_an_error_of_wandb_is_said_once_and_the_rows_are_sent_by_the_next_start(tmp_path, capsys):
    pytest.importorskip("wandb", reason="wandb is not installed")
    broken = start(tmp_path, 0, WandbConfig(project="no/such:name", mode="offline"))
    train(broken, range(1, 4), 1.0)
    save(broken, 3)
    assert broken.close() is None
    assert capsys.readouterr().out.count("W&B gets no more rows from this start") == 1
    later = start(tmp_path, 3)
    later.close()
    assert history(tmp_path)[0] == [(step, 1.0) for step in range(1, 4)]
