"""GPU kernels for paged attention and their jnp reference. Imports jax only."""
