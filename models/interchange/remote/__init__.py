"""Code that `baton export` puts beside the weights of models that no other library has, for transformers' trust_remote_code.

It needs torch and transformers alone. `export.py` writes it; nothing of Baton's training runs through it.
"""
