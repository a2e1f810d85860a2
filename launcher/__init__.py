"""The `baton` command, the typed run configuration, and starting processes on this machine."""
