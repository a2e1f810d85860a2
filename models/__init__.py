"""What is trained: one file per mixer, the block, the language model."""
