"""On two GPUs: a rank of a run is stopped, and all ranks end in time, with a sentence about it; a slow start is no hang."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from support.hangs import LAYOUTS, RUN, SAID, befall, wait_for_stop
from support.runs import Launch, gone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TIMEOUT_S = 30
SLACK_S = 15


MODEL = RUN["model"] | {"d_model": 128, "mixers": {"mamba": {"d_state": 16}}}
TRAINING = RUN["training"] | {"sequence_length": 256, "global_batch_tokens": 2048}


def started(folder, case, *words):
    """A run of two ranks; case: the layout that has them."""
    file = folder / f"{case}.yaml"
    file.write_text(yaml.safe_dump(RUN | {"device": "cuda", "model": MODEL, "training": TRAINING}))
    layout = case if case in LAYOUTS else "data"
    return Launch(folder / case, str(file), f"layout.{layout}=2", *words, where=Path.cwd())


def test_a_stopped_rank_ends_all_others_in_time_and_is_named(tmp_path, monkeypatch):
    """All cases at once: what they take is mostly waiting. In "spins" rank 1 is not stopped, but never leaves a step."""
    running = {case: started(tmp_path, case, f"layout.timeout_s={TIMEOUT_S}") for case in LAYOUTS}
    for case, fate, place, count in (("save", "stop", "save", 2), ("spins", "spin", "step", 40)):
        with monkeypatch.context() as patch:
            befall(tmp_path, patch, fate, place, count)
            running[case] = started(tmp_path, case, f"layout.timeout_s={TIMEOUT_S}")
    results, trouble = {}, {}

    def follow(case, one):
        try:
            if case == "save":
                wait_for_stop(one)
                ranks = one.ranks()
            else:
                ranks = one.wait_for_steps(1, 12 if case in LAYOUTS else 5)
            if case in LAYOUTS:
                ranks[1].send_signal(signal.SIGSTOP)
            since = time.monotonic()
            ended = one.end()
            seconds = time.monotonic() - since
            if case == "spins":  # since the last step that was recorded
                seconds = time.time() - (one.folder / "metrics.jsonl").stat().st_mtime
            results[case] = seconds, ended, all(gone(rank) for rank in ranks)
        except BaseException as error:
            trouble[case] = f"{error!r}\n{''.join(one.read())[-2000:]}"
            one.process.kill()

    threads = [threading.Thread(target=follow, args=item) for item in running.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"\nlayout.timeout_s={TIMEOUT_S}; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for case, (seconds, ended, _) in results.items():
        print(f"{case:9s} {seconds:6.1f} s  status {ended.status}  {ended.err.strip().splitlines()[-1]}")
    assert not trouble, "\n".join(f"{case}: {what}" for case, what in trouble.items())
    for case, (seconds, ended, all_gone) in results.items():
        assert ended.status == 76, (case, ended.err)
        assert all_gone, case
        said = SAID.search(ended.err)
        assert said, (case, ended.err)
        if case == "spins":
            assert said["why"].startswith("in step "), ended.err
        else:
            assert said["why"] == "stopped by a signal"
            assert "it was in step " in said["doing"], case
        assert ("save" in said["doing"]) == (case == "save")
        assert seconds < TIMEOUT_S + SLACK_S, (case, seconds)


def test_a_first_step_that_takes_longer_than_any_silence_may_is_no_hang(tmp_path, monkeypatch):
    """Every kernel is compiled, and one rank sleeps in its first step; then an evaluation and saves."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    befall(tmp_path, monkeypatch, "sleep", "step", 1, seconds=25)
    running = {case: started(tmp_path, case, "layout.timeout_s=10", "training.steps=25") for case in ("tensor", "context")}
    for case, one in running.items():
        began = time.monotonic()
        ended = one.end()
        first = next(row for row in ended.rows if row["kind"] == "train")
        print(f"\n{case}: status {ended.status} after {time.monotonic() - began:.0f} s, first step {first['seconds']}")
        said = [line for line in ended.err.splitlines() if not line.startswith("note: auto: ")]
        assert (ended.status, said) == (0, []), case
