"""What recurrences with a diagonal transition share: `chunked` on any device, `triton_launch` and its kernels on a GPU."""
