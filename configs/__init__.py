"""Baton's YAML files: models/ (every size), runs/ (recipes and the demo), clusters/ (machines)."""
