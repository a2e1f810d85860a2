"""What a run takes on a cluster: memory, communication, time, and changes that would make it fit. Torch-free."""
