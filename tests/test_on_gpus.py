"""benchmarks/on_gpus.py: the assignment of benchmarks to GPUs, those that are not started, and those that end at the deadline."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
on_gpus = import_module("on_gpus")
Job, Run = on_gpus.Job, on_gpus.Run

SEEN = 'echo "$CUDA_VISIBLE_DEVICES"; {then}'


def job(name, then="true", seconds=1.0, gpus=1):
    return Job(name, ("/bin/sh", "-c", SEEN.format(then=then)), seconds, gpus)


def seen(folder, name):
    return (folder / f"{name}.log").read_text().strip()


def test_one_gpu_has_one_job_at_a_time_and_those_for_all_come_last(tmp_path):
    until_c = f"until [ -e {tmp_path}/c-was-here ]; do sleep 0.05; done"
    last = job("c", then=f"touch {tmp_path}/c-was-here")
    jobs = [job("all", gpus=0), job("long", then=until_c), job("a"), job("b"), last, job("two", gpus=2)]
    done = Run(2, 60.0, tmp_path).all(jobs)
    assert [one.job.name for one in done[-2:]] == ["all", "two"]
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
    (one,) = Run(1, 5.0, tmp_path).all([job("slow", then="exec sleep 600")])
    assert one.status not in (None, 0), "it was ended, or had come to its end"
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
