"""Checkpoints: fp32 masters and Adam moments as rectangles in safetensors files, beside a manifest.

`shard_boxes` says where a ZeRO fragment lies in the whole tensors, `files` writes and reads them, `digest` is the checksum of a
tensor however it is cut, `manifest` holds everything else, `store` publishes, verifies, falls back and prunes, `retention` says
which are kept, `interval` when to save, and `tools` is what the command line does with a run's checkpoints.
"""
