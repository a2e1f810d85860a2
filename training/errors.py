"""Errors of a run that a user can act on; the command line prints the sentence and exits with the status."""


class RunError(Exception):
    """A run that cannot start or go on: the message says what, where and what to do."""

    exit_status = 2


class CheckpointError(RunError):
    """A checkpoint that is damaged, missing, or of another run."""


class KernelCheckError(RunError):
    """A kernel does not compute on this machine what its definition says."""

    exit_status = 1


class StoppedError(RunError):
    """A run that was asked to end, and did so at a step boundary with everything saved. (75: sysexits' "try again later")"""

    exit_status = 75
