"""Mixers, one file per kind. Each file here is a kind that a configuration can name. See baton.models.mixer."""
