"""What a decode step's attention costs by block size, through the engine's own path."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.device.attention import AttentionMeta, AttentionSizes, PagedAttention
from jaxpaged.device.attention_choice import choose_backend
from jaxpaged.device.kv_cache import storage_dtype
from pallas_kernels.paged_kv import PagedKV, PrefillTiles

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
"""Of SmolLM2-135M."""


def measure(
    block_sizes: Sequence[int], *, rows: int, context: int, dtype: str, rounds: int
) -> dict[str, Any]:
    """Milliseconds of the attention of all layers, one token for each of `rows` sequences of
    `context` tokens whose blocks lie about at random; KV write included. In turns over the sizes.
    """
    steps: dict[int, Callable[[], None]] = {}
    name = variant = ""
    for size in block_sizes:
        backend = _backend(size, jnp.dtype(dtype))
        name, variant = backend.name, getattr(backend, "variant", None) or ""
        steps[size] = _step(backend, rows, context)
        steps[size]()  # compiles
    wall: dict[int, list[float]] = {size: [] for size in block_sizes}
    cpu: dict[int, list[float]] = {size: [] for size in block_sizes}
    for _ in range(rounds):
        for size, step in steps.items():
            start, used = time.perf_counter(), time.process_time()
            step()
            wall[size].append(1000 * (time.perf_counter() - start))
            cpu[size].append(1000 * (time.process_time() - used))
    figures = {
        str(size): {
            "median_ms": statistics.median(wall[size]),
            "min_ms": min(wall[size]),
            "cpu_ms": statistics.median(cpu[size]),
        }
        for size in block_sizes
    }
    return {
        "backend": f"{name} {variant}".strip(),
        "rows": rows,
        "context": context,
        "dtype": dtype,
        "sizes": figures,
    }


def _backend(block_size: int, dtype: jnp.dtype) -> PagedAttention:
    sizes = AttentionSizes(
        group=HEADS // KV_HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        latent=False,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=dtype,
        windows=frozenset([None]),
        soft_cap=None,
    )
    return choose_backend("auto", sizes, jax.devices()[0])[0]


def _step(backend: PagedAttention, rows: int, context: int) -> Callable[[], None]:
    """A call that computes one step and waits for it."""
    size, dtype = backend.sizes.block_size, backend.sizes.dtype
    width = -(-context // size)
    rng = np.random.default_rng(size)
    tables = rng.permutation(rows * width).astype(np.int32).reshape(rows, width) + 1
    slots = tables[:, (context - 1) // size] * size + (context - 1) % size
    nothing = jnp.zeros(0, jnp.int32)
    meta = AttentionMeta(
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(tables),
        jnp.full(rows, context - 1, jnp.int32),
        PrefillTiles(nothing, nothing, nothing, nothing, nothing, jnp.zeros((), jnp.int32)),
    )
    stored = storage_dtype(dtype, jax.devices()[0].platform)
    shape = ((rows * width + 1) * size, KV_HEADS, HEAD_DIM)

    def pool() -> jax.Array:
        values = jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        return values if stored == dtype else jax.lax.bitcast_convert_type(values, stored)

    caches = [PagedKV(pool(), pool()) for _ in range(LAYERS)]
    q = jnp.asarray(rng.standard_normal((rows, HEADS, HEAD_DIM), np.float32), dtype)
    new = jnp.asarray(rng.standard_normal((rows, KV_HEADS, HEAD_DIM), np.float32), dtype)

    @partial(jax.jit, donate_argnums=0)
    def attend(
        kv: list[PagedKV], q: jax.Array, new: jax.Array, meta: AttentionMeta
    ) -> tuple[list[PagedKV], jax.Array]:
        written = []
        for cache in kv:
            out, after = backend.attend(
                q, new, new, cache, meta, scale=HEAD_DIM**-0.5, window=None, soft_cap=None
            )
            q = out.astype(q.dtype)
            written.append(after)
        return written, q

    state = {"kv": caches}

    def step() -> None:
        state["kv"], out = attend(state["kv"], q, new, meta)
        out.block_until_ready()

    return step
