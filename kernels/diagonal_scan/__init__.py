"""What recurrences with a diagonal transition share: `chunked` on any device, `triton` and its kernels on a GPU."""
