"""The exception by which the preflight checks reject a node. Torch-free."""


class UnfitNode(Exception):  # noqa: N818 (a result of the checks, not an error of the program)
    """A node must not be used; the message is the reason."""
