"""Mamba's selective scan: a diagonal linear state per channel whose decay, input and output depend on the token."""

from baton.kernels.selective_scan.op import Discretization, selective_scan
from baton.kernels.selective_scan.selective_scan_interface import selective_scan_fn

__all__ = ["Discretization", "selective_scan", "selective_scan_fn"]
