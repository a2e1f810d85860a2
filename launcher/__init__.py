"""The way in: the `baton` command, the typed run configuration, and the starting of processes on this machine."""
