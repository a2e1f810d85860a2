"""Mamba's selective scan: a diagonal linear state per channel whose decay, input and output depend on the token."""

from baton.kernels.selective_scan.op import Discretization, selective_scan

__all__ = ["Discretization", "selective_scan"]
