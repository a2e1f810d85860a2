"""Models of other libraries: their configurations and tensors, mapped to and from Baton's."""
