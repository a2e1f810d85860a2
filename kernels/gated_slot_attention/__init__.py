"""Gated slot attention: slots of keys and values per head, written by a gated average and read by attention over the slots."""

from baton.kernels.gated_slot_attention.op import gated_slot_attention

__all__ = ["gated_slot_attention"]
