"""mLSTM, xLSTM's matrix memory: gated linear attention with an exponential input gate, divided by a normalizer."""

from baton.kernels.mlstm.op import mlstm

__all__ = ["mlstm"]
