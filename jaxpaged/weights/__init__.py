"""Checkpoint readers, and the loading of weights into models."""
