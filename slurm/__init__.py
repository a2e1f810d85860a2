"""Turning a run into SLURM jobs and keeping it alive across them. Nothing of it exists yet: runs start on one machine."""
