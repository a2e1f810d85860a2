"""Scans with a diagonal transition, shared by Mamba and Longhorn: `chunked` in PyTorch on any device, Triton kernels on a GPU."""
