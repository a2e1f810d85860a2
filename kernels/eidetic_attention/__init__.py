"""B'MOJO's attention: one softmax over a window, fading tokens and eidetic tokens; the eidetic ones are kept by a top-k memory."""

from baton.kernels.eidetic_attention.op import eidetic_attention, innovation

__all__ = ["eidetic_attention", "innovation"]
