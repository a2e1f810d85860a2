"""Exit codes of jobs and of the processes in them, with their meaning and consequence. docs/slurm.md shows this table."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of job steps and jobs. Codes from 74 on are Baton's; as usual, 128 + n is signal n."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    STORAGE = 74
    STOPPED = 75
    HUNG = 76
    NODE_LOST = 77
    SAVE_TOO_LONG = 78
    PREFLIGHT = 79
    NO_PROGRESS = 80
    NO_RETRIES = 81
    SUPERSEDED = 82
    NO_JOB = 83
    NOT_STARTED = 84
    BUSY = 85


MEANING = {
    Exit.DONE: ("the last step is done and saved", "nothing"),
    Exit.FAILED: ("a rank died or raised", "tried again; its node is suspected if a signal killed it"),
    Exit.BAD_INPUT: ("the configuration or the data cannot be used", "the run is stopped: no retry could mend it"),
    Exit.STORAGE: (
        "files could not be read or written: a read error, a full disk, a quota; checkpoints are as they were",
        "tried again, jobs.max_failures_without_progress times without a new step",
    ),
    Exit.STOPPED: ("told to stop (time limit, preemption, stop file); saved at a step boundary", "goes on in the next job"),
    Exit.HUNG: ("a rank gave no sign of life; the stacks of all ranks are in the attempt", "tried again; its node is suspected"),
    Exit.NODE_LOST: ("a node gave no sign of life", "tried again without that node, which is excluded"),
    Exit.SAVE_TOO_LONG: ("told to stop, and not done with saving in save_timeout_s seconds", "goes on from the checkpoint before"),
    Exit.PREFLIGHT: ("too few nodes passed the checks", "tried again on other nodes; the bad ones are excluded"),
    Exit.NO_PROGRESS: (
        "attempts in a row made no new step, or had no fit node",
        "the run is stopped; the reason says what to do",
    ),
    Exit.NO_RETRIES: ("jobs.max_failures attempts failed since `baton submit`", "the run is stopped"),
    Exit.SUPERSEDED: ("another job of this run trains it", "this job ends"),
    Exit.NO_JOB: ("SLURM takes no further job, as when too many nodes are excluded", "the run is stopped"),
    Exit.NOT_STARTED: ("srun could not start the checks or the agents; its words are in the reason", "tried again in the next job"),
    Exit.BUSY: ("another process holds the run directory; the reason names it", "tried again in the next job, without limit"),
}
"""For each code: what happened, and what follows."""
