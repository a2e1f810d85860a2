"""Errors of layouts, and of ranks that miss each other."""


class LayoutError(Exception):
    """A layout (tensor, pipeline, sequence, data, ZeRO) that cannot run; the message says which sizes would."""

    exit_status = 2


class CommError(Exception):
    """A message between ranks did not come: one of them has died or hangs. It is named, with the rank and the layer."""

    exit_status = 1
