"""Runs as SLURM jobs: the job script, the decisions after each attempt, preflight checks, and the agents on the nodes."""
