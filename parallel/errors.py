"""Errors of layouts, of communication between ranks and of the host's memory."""


class LayoutError(Exception):
    """A layout (tensor, pipeline, context, data, ZeRO) that cannot run; the message names sizes that can."""

    exit_status = 2


class CommError(Exception):
    """A message between ranks did not arrive, because a rank has died or hangs. The error names the message, the rank and the
    layer."""

    exit_status = 1


class HostMemoryError(Exception):
    """The host has too little memory for what is offloaded to it; the message names settings."""

    exit_status = 2
