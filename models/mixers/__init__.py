"""One file per mixer: what mixes tokens along the sequence, written like single-device code over tensor-parallel projections.

A mixer maps (x [B, T, d_model], pos [B, T], State or None) to (y [B, T, d_model], State); None is the state before any token.
"""
