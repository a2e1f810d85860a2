"""Checkpoints: fp32 masters and Adam moments as rectangles in torch.distributed.checkpoint files, beside a manifest.

`rectangles` says where a ZeRO fragment lies in the whole tensors, `planner` writes and reads those rectangles, `manifest` holds
everything else and the checksums, and `store` publishes, verifies, falls back and prunes.
"""
