"""Metrics, time ledger and goodput, profiler, plots, heartbeats, and checks for anomalies and differing replicas."""
