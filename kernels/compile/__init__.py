"""Compiling and configuring Triton kernels: ahead-of-time compilation, the table of launch configurations, and autotuning."""
