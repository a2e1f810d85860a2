"""Plans a run on a cluster: memory, communication, time, and changes with which it fits. Torch-free."""
