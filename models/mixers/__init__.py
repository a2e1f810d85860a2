"""One file per kind of mixer, and nothing else: a file here is a kind that a configuration can name. See baton.models.mixer."""
