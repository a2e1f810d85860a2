"""Models: mixers and their settings, layers, the language model and its pipeline stages."""
