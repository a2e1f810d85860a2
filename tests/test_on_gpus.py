"""What runs the benchmarks on several GPUs at once: who gets which GPU, what is not begun, and what ends at the deadline."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
on_gpus = import_module("on_gpus")
Job, Run = on_gpus.Job, on_gpus.Run

SEEN = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep({sleep})"


def job(name, sleep=0.0, seconds=1.0, gpus=1):
    return Job(name, (sys.executable, "-c", SEEN.format(sleep=sleep)), seconds, gpus)


def seen(folder, name):
    return (folder / f"{name}.log").read_text().strip()


def test_one_gpu_has_one_job_at_a_time_and_those_for_all_come_last(tmp_path):
    jobs = [job("all", gpus=0), job("long", sleep=2.0), job("a"), job("b"), job("c"), job("two", gpus=2)]
    done = Run(2, 60.0, tmp_path).all(jobs)
    assert [one.job.name for one in done[-3:]] == ["long", "all", "two"]
    assert all(one.status == 0 for one in done)
    # while one GPU has the long one, the other has all the others
    assert seen(tmp_path, "long") == "0"
    assert {seen(tmp_path, name) for name in "abc"} == {"1"}
    assert seen(tmp_path, "all") == seen(tmp_path, "two") == "0,1"


def test_what_there_is_no_time_or_no_gpu_for_is_not_begun(tmp_path):
    done = {
        one.job.name: one
        for one in Run(1, 30.0, tmp_path).all([job("long", seconds=31.0), job("pair", gpus=2), job("all", gpus=0)])
    }
    assert {name: one.status for name, one in done.items()} == dict.fromkeys(("long", "pair", "all"))
    assert not list(tmp_path.iterdir())


def test_at_the_deadline_a_job_is_told_to_end(tmp_path):
    (one,) = Run(1, 2.0, tmp_path).all([job("slow", sleep=60.0)])
    assert one.status not in (None, 0)
    assert one.seconds < 20
    assert seen(tmp_path, "slow") == "0", "what it had said is kept"


def test_every_job_is_a_program_with_options_that_it_has(tmp_path):
    """Those of the programs that parse them without a GPU."""
    for one in on_gpus.JOBS:
        program = Path(one.command[1])
        assert program.exists(), program
        text = program.read_text() + (program.parent / "train_step.py").read_text()
        for word in one.command[2:]:
            if word.startswith("--"):
                assert f'"{word}"' in text, (program.name, word)
    assert [one.name for one in on_gpus.chosen("exchange,matrix_g")] == ["exchange", "matrix_gsa", "matrix_gla", "matrix_gated"]
