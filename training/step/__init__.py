"""One optimizer step: batches to ranks, forward and backward passes of the micro-batches, the update."""
