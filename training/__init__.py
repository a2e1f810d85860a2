"""One run: the loop, the step executor and DeepSpeed, checkpoints, monitoring, evaluation, generation."""
