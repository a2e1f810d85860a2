"""Longhorn's recurrence: a diagonal linear state per channel that is the closed-form step of an online associative recall."""

from baton.kernels.longhorn.op import longhorn

__all__ = ["longhorn"]
