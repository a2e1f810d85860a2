"""Validation loss, accuracy, long-context evaluation and text generation."""
