"""Recordings of an engine: what it was told, what it decided, and the tokens that came of it."""
