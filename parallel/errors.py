"""The error of a layout that cannot be."""


class LayoutError(Exception):
    """A layout (tensor, pipeline, sequence, data, ZeRO) that cannot run; the message says which sizes would."""

    exit_status = 2
