"""`jaxpaged bench`: how fast a server, or the engine alone, answers. Never imports jax, but for the
offline benchmarks once they run.
"""
