"""Checkpoints: fp32 masters, Adam moments and lanes' States as boxes of whole tensors in safetensors files, and a manifest.

`shard_boxes`: where a ZeRO fragment lies in the whole tensors. `files`: writes and reads them. `digest`: checksum of a
tensor, however it is split. `manifest`: everything else. `store`: publishing, verification, fallback, pruning. `retention`:
which checkpoints are kept. `interval`: when to save. `resume`: loads the newest into a run. `fork`: makes one the first of
another run. `weights_format`: of files of weights. `tools`: the commands.
"""
