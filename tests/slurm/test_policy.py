"""The decision after an attempt and its reason, for many histories; nodes that are excluded; the layout for the nodes of a job."""

import json
import time
from pathlib import Path

import pytest
import yaml
from support.jobs import RUN

from baton.launcher.config import load
from baton.launcher.errors import ConfigError
from baton.launcher.jobs_config import JobsConfig, SlurmConfig
from baton.slurm import policy
from baton.slurm.elastic import fitted, nodes_for
from baton.slurm.exits import MEANING, Exit
from baton.slurm.liveness import Nodes
from baton.slurm.outcome import gather
from baton.slurm.policy import Outcome
from baton.slurm.script import AGAIN, NEXT_JOB, OTHER_NODES

SUBMITTED = {"kind": "submitted", "time": 0.0, "by": "user", "nodes": [2, 2]}


def start(step, attempt=1):
    return {"kind": "start", "time": 0.0, "attempt": attempt, "step": step}


def end(status, step=0, suspects=(), attempt=1, **more):
    return more | {
        "kind": "end",
        "time": 0.0,
        "attempt": attempt,
        "status": int(status),
        "reason": "…",
        "step": step,
        "suspects": list(suspects),
    }


def out(node):
    return {"kind": "excluded", "time": 0.0, "node": node, "reason": "…"}


def decision(*rows, jobs=None, **changes):
    known = {"told_to_stop": False, "time_is_up": False, "allocated": ["n1", "n2"], "needed": 2}
    return policy.decide([SUBMITTED, *rows], jobs or JobsConfig(), SlurmConfig(time="10", warning_s=60), **known | changes)


def code(*rows, **changes):
    return decision(*rows, **changes).code


def test_what_is_done_after_each_end():
    assert code(end(Exit.DONE, 9)) == Exit.DONE
    assert code(end(Exit.STOPPED, 9)) == NEXT_JOB
    assert code(end(Exit.STOPPED, 9), told_to_stop=True) == Exit.STOPPED
    assert code(end(Exit.BAD_INPUT)) == Exit.BAD_INPUT, "no retry could mend it"
    assert code(end(Exit.FAILED, 9)) == AGAIN, "in the nodes that are there"
    assert code(end(Exit.STORAGE, 9)) == AGAIN, "what cannot be read or saved at present may be later"
    assert code(end(Exit.STORAGE, 9), end(Exit.STORAGE, 9), end(Exit.STORAGE, 9)) == Exit.NO_PROGRESS, "and not for ever"
    assert code(end(Exit.FAILED, 9), time_is_up=True) == NEXT_JOB
    assert code(end(Exit.SAVE_TOO_LONG, 9), time_is_up=True) == NEXT_JOB
    assert code(end(Exit.NODE_LOST, 9), out("n2")) == OTHER_NODES
    assert code(end(Exit.NODE_LOST, 9), out("n2"), allocated=["n1", "n2", "n3"]) == AGAIN, "there was one to spare"
    assert code(end(Exit.STOPPED, 9), out("n2")) == OTHER_NODES
    assert code(end(Exit.PREFLIGHT), out("n1")) == OTHER_NODES


def test_a_run_that_makes_no_new_step_is_stopped():
    assert code(end(Exit.FAILED, 0)) == AGAIN
    assert code(end(Exit.FAILED, 0), end(Exit.FAILED, 0)) == Exit.NO_PROGRESS
    assert code(end(Exit.FAILED, 7), end(Exit.FAILED, 7), end(Exit.FAILED, 5)) == Exit.NO_PROGRESS, "steps done again are not new"
    assert code(end(Exit.FAILED, 7), end(Exit.FAILED, 7), end(Exit.FAILED, 8)) == AGAIN
    assert (
        code(end(Exit.HUNG, 7), end(Exit.HUNG, 7), end(Exit.FAILED, 7), jobs=JobsConfig(max_failures_without_progress=3)) == AGAIN
    )
    assert code(*[end(Exit.NODE_LOST, 0)] * 9) == AGAIN, "nodes die of themselves"
    assert code(end(Exit.FAILED, 0), end(Exit.NODE_LOST, 0), end(Exit.FAILED, 0)) == Exit.NO_PROGRESS
    assert code(end(Exit.FAILED, 0), end(Exit.STOPPED, 0)) == Exit.NO_PROGRESS, "however politely it ended"


def test_an_attempt_that_was_told_to_stop_makes_progress_by_steps_beyond_its_start():
    stop = Exit.STOPPED
    assert code(end(stop, 0)) == NEXT_JOB
    found = decision(end(stop, 0, attempt=1), end(stop, 0, attempt=2))
    assert found.code == Exit.NO_PROGRESS
    assert (
        "A job of slurm.time=10 must have room for its start and for steps before its last slurm.warning_s=60 s" in found.sentence
    )
    begun = (start(0), end(stop, 5), start(5, 2), end(stop, 5, attempt=2))
    assert code(*begun) == NEXT_JOB
    assert code(*begun, start(5, 3), end(stop, 5, attempt=3)) == Exit.NO_PROGRESS
    # a crash at step 90 lost what was after step 10: 30 and 60 are not new, but they are saved, and the next goes on from there
    crash = (start(0), end(Exit.FAILED, 90))
    assert code(*crash, start(10, 2), end(stop, 30, attempt=2), start(30, 3), end(stop, 60, attempt=3)) == NEXT_JOB
    assert code(end(stop, 0), end(stop, 0, attempt=2), told_to_stop=True) == stop, "a person's stop file is no failure"


def test_jobs_that_slurm_ends_itself_have_more_patience_but_not_without_end():
    ended = end(Exit.STOPPED, 0, seen=False)
    assert code(*[ended] * 7) == NEXT_JOB
    found = decision(*[ended] * 8)
    assert found.code == Exit.NO_PROGRESS
    assert found.sentence.startswith("the run is stopped: 8 attempts in a row made no new step, and SLURM ended 8 of them")
    assert code(*[ended] * 7, end(Exit.STOPPED, 1), *[ended] * 7) == NEXT_JOB


def test_a_busy_run_is_looked_at_again_and_counts_for_nothing():
    busy = end(Exit.BUSY)
    assert code(*[busy] * 300) == NEXT_JOB
    assert code(busy, busy, end(Exit.FAILED, 0)) == AGAIN
    assert code(end(Exit.FAILED, 0), busy, end(Exit.FAILED, 0)) == Exit.NO_PROGRESS
    assert code(*[busy] * 3, end(Exit.FAILED, 1), jobs=JobsConfig(max_failures=1)) == AGAIN


def test_a_step_that_srun_does_not_start_is_tried_in_another_job_and_not_for_ever():
    assert code(end(Exit.NOT_STARTED)) == NEXT_JOB, "in this job it would fail again"
    assert code(end(Exit.NOT_STARTED), out("n2")) == OTHER_NODES
    assert code(end(Exit.NOT_STARTED), end(Exit.NOT_STARTED)) == Exit.NO_PROGRESS


def test_checks_that_no_node_passes_are_not_repeated_over_the_whole_cluster():
    def checked(passed):
        return [{"kind": "preflight", "time": 0.0, "passed": passed}, end(Exit.PREFLIGHT)]

    assert code(*checked(0) * 3, out("n1")) == OTHER_NODES
    found = decision(*checked(0) * 4, out("n1"))
    assert (found.code, "probably not the cause" in found.sentence) == (Exit.NO_PROGRESS, True)
    assert code(*checked(0) * 3, *checked(1), *checked(0) * 3, out("n1")) == OTHER_NODES, "one node passed in between"


def test_submitting_again_forgives():
    assert code(end(Exit.FAILED, 0), end(Exit.FAILED, 0), SUBMITTED, end(Exit.FAILED, 0)) == AGAIN
    assert code(end(Exit.FAILED, 0), end(Exit.FAILED, 0), SUBMITTED, end(Exit.FAILED, 0), end(Exit.FAILED, 0)) == Exit.NO_PROGRESS


def test_retries_are_bounded():
    rows = [end(Exit.FAILED, step) for step in range(1, 5)]
    assert code(*rows, jobs=JobsConfig(max_failures=4)) == AGAIN
    assert code(*rows, jobs=JobsConfig(max_failures=3)) == Exit.NO_RETRIES


def test_nodes_are_excluded_at_once_when_dead_and_after_strikes_when_suspected():
    dead = Outcome(Exit.NODE_LOST, "gone", dead=("n1",))
    assert policy.struck_out([SUBMITTED, end(Exit.NODE_LOST)], dead, max_node_failures=2) == {"n1": "gone"}
    crash = Outcome(Exit.FAILED, "SIGSEGV", suspects=("n2",))
    first = [SUBMITTED, end(Exit.FAILED, 3, ["n2"])]
    assert policy.struck_out(first, crash, max_node_failures=2) == {}
    second = [*first, end(Exit.FAILED, 5, ["n2"])]
    assert policy.struck_out(second, crash, max_node_failures=2) == {"n2": "2 crashes or hangs there, the last: SIGSEGV"}
    assert policy.struck_out([*second, out("n2")], crash, max_node_failures=2) == {}
    assert policy.excluded([*second, out("n2"), out("n1"), out("n2")]) == ["n2", "n1"]


def test_every_code_has_its_meaning_and_codes_are_distinct():
    assert set(MEANING) == set(Exit)
    assert len({int(one) for one in Exit} | {AGAIN, NEXT_JOB, OTHER_NODES}) == len(Exit) + 3


def test_the_table_of_codes_is_the_one_in_the_documentation():
    table = [f"| {int(code)} | {code.name} | {means} | {done} |" for code, (means, done) in MEANING.items()]
    text = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("| ")][2:] == table


@pytest.fixture
def attempt(tmp_path):
    folder = tmp_path / "attempts" / "0001"
    (folder / "nodes").mkdir(parents=True)
    (folder / "nodes.txt").write_text("n1,n2")
    return folder


def say(folder, node, status=None, *, told=False):
    (folder / "nodes" / node).write_text(json.dumps({"count": 3, "time": 1.0, "ranks": {}}))
    if status is not None:
        (folder / "nodes" / f"{node}.end").write_text(json.dumps({"status": int(status), "reason": "…", "told": told, "ranks": {}}))


def test_an_attempt_ends_as_its_agents_say(attempt):
    assert gather(attempt, 1).status == Exit.NOT_STARTED, "no agent was there"
    assert gather(attempt, 137).status == Exit.FAILED, "somebody killed srun"
    assert gather(attempt, 0).status == Exit.STOPPED
    say(attempt, "n1", Exit.DONE)
    say(attempt, "n2", Exit.DONE)
    assert gather(attempt, 0).status == Exit.DONE
    say(attempt, "n2", Exit.STOPPED, told=True)
    assert gather(attempt, 0).status == Exit.STOPPED


def test_the_first_verdict_counts(attempt):
    say(attempt, "n1", Exit.FAILED)
    verdict = {"status": 76, "reason": "rank 3 hung", "suspects": ["n2"], "dead": []}
    (attempt / "ending").write_text(json.dumps(verdict))
    assert gather(attempt, 137) == Outcome(Exit.HUNG, "rank 3 hung", (), ("n2",))


def test_an_agent_that_dies_alone_is_a_failure_and_with_its_job_is_not(attempt):
    say(attempt, "n1", Exit.STOPPED, told=True)
    say(attempt, "n2")
    assert gather(attempt, None).status == Exit.STOPPED
    say(attempt, "n1", Exit.FAILED)
    found = gather(attempt, 137)
    assert (found.status, found.suspects, found.reason) == (Exit.FAILED, ("n2",), "the agent on n2 died (srun: SIGKILL)")


def test_a_dead_node_is_seen_by_the_first_and_the_first_by_all(attempt):
    (attempt / "nodes" / "n1").write_text('{"count": 1}')
    (attempt / "nodes" / "n2").write_text('{"count": 1}')
    first, second = (Nodes(attempt, ["n1", "n2", "n3"], own, lost_s=10) for own in (0, 1))
    now = time.monotonic()
    for watching in (first, second):
        assert watching.lost(now) is None
    (attempt / "nodes" / "n2").write_text('{"count": 2}')
    (attempt / "nodes" / "n3.end").write_text("{}")
    assert first.lost(now + 9) is None
    assert first.lost(now + 18) is None
    assert first.lost(now + 30) == "n2", "n3 ended by itself"
    assert second.lost(now + 30) == "n1"


@pytest.fixture
def config(tmp_path):
    def make(*words):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"name": "elastic"}))
        return load(tmp_path / "run.yaml", list(words))

    return make


@pytest.mark.parametrize(
    ("words", "nodes", "data", "micro_batch_size", "used"),
    [
        ((), 2, 4, 2, 2),
        ((), 1, 2, 2, 1),
        ((), 3, 4, 2, 2),  # 6 ranks do not divide 8 sequences
        ((), 4, 8, 1, 4),
        (("layout.tensor=2", "layout.data=2"), 1, 1, 2, 1),
        (("layout.context=4", "layout.data=1"), 4, 2, 2, 4),
        (("jobs.elastic=none",), 4, 4, 2, 2),
    ],
)
def test_the_layout_follows_the_nodes_and_the_global_batch_stays(config, words, nodes, data, micro_batch_size, used):
    found, count = fitted(config(*words), nodes, 2)
    assert (found.layout.data, found.training.micro_batch_size, count) == (data, micro_batch_size, used)
    assert found.training.global_batch_tokens == 256
    assert found.is_legal()


def test_nodes_that_cannot_be_used_are_refused(config):
    with pytest.raises(ConfigError, match=r"jobs.elastic=none; set jobs.elastic=data"):
        fitted(config("jobs.elastic=none"), 1, 2)
    with pytest.raises(ConfigError, match=r"no layout.data fits 1 nodes of 2 ranks"):
        fitted(config("layout.context=4", "layout.data=1"), 1, 2)
    assert nodes_for(config("layout.data=2"), 8) == 1
