"""Errors of a run on which a user can act; the command prints the message and exits with the status."""


class RunError(Exception):
    """A run that cannot start or continue. The message is one line: what, where, what to do."""

    exit_status = 2


class CheckpointError(RunError):
    """A checkpoint that is damaged, missing, or of another run."""


class OtherFormatError(CheckpointError):
    """A checkpoint, or a file of weights, in a format that this version does not read: it is sound, and stays where it is."""


class KernelCheckError(RunError):
    """A kernel's results differ from its reference implementation on this machine."""

    exit_status = 1


class StoppedError(RunError):
    """A run that was asked to stop, and did so at a step boundary with everything saved. (75: EX_TEMPFAIL of sysexits.h)"""

    exit_status = 75
