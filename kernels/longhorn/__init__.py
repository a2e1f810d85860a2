"""Longhorn: a diagonal linear state per channel, updated by the closed-form step of an online associative recall objective."""

from baton.kernels.longhorn.op import longhorn

__all__ = ["longhorn"]
