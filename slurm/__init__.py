"""Turning a run into SLURM jobs and keeping it alive across them. The script, what it asks, and the agents on the nodes."""
