"""Flax NNX model definitions: shared layers, one small file per family, and the registry."""
