"""Errors of layouts and of communication between ranks."""


class LayoutError(Exception):
    """A layout (tensor, pipeline, context, data, ZeRO) that cannot run; the message names sizes that can."""

    exit_status = 2


class CommError(Exception):
    """A message between ranks did not arrive, because a rank has died or hangs. The error names the message, the rank and the
    layer."""

    exit_status = 1
