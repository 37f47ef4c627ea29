"""The native CPU kernels against plain XLA: decode, prompts, and writing into the cache.

    python scripts/bench_native.py [--dtype bfloat16] [--cache int8] [--layers 30] [--rounds 7]
        [--heads 9 --kv-heads 3 --head-dim 64] [--quick] [--out FILE]

Sizes are those of SmolLM2-135M unless given. Every case is one program of --layers layers, each
with pools of its own, so that caches are not read from the processor's. Both sides run in turns,
--rounds times. Columns: milliseconds for all layers, medians of the clock and of the CPU over all
threads (which says more on a machine that does other work as well), of both sides; `ratio` is
reference / native by the clock, the median of the rounds' own ratios; GB/s of keys and values
(decode, write) or GFLOP/s (prompts) of the native side, by the clock. The last line of the output
is JSON, which --out writes to a file as well.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_report import provenance, publish

from pallas_kernels import reference
from pallas_kernels.native import build, ops
from pallas_kernels.paged_kv import PagedKV, PrefillTiles, is_8_bit

BLOCK_SIZE = 16
DECODE = [(batch, context) for batch in (1, 8, 32) for context in (64, 256, 1024, 4096)]
PROMPTS = (128, 512, 2048)
WRITES = (8, 512)
MOST_BYTES = 3 << 30
"""Of the pools of a case: the largest take fewer layers."""
Run = Callable[[], Any]


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    cache_dtype: Any

    @property
    def token_bytes(self) -> int:
        """Of one layer's keys and values."""
        return 2 * self.kv_heads * self.head_dim * int(self.cache_dtype.itemsize)

    def pools(self, blocks: int, layers: int) -> list[PagedKV]:
        """As the engine has them on CPU: small floats as integers."""
        slots, rng = blocks * BLOCK_SIZE, np.random.default_rng(0)
        values = rng.standard_normal((slots, self.kv_heads, self.head_dim), np.float32)
        scaled = is_8_bit(self.cache_dtype)
        stored = (values * 30 if scaled else values).astype(self.cache_dtype)
        if stored.dtype != np.float32 and stored.dtype != np.int8:
            stored = stored.view(f"u{stored.itemsize}")
        scales = np.full((slots, self.kv_heads), 0.03, np.float32)

        def layer() -> PagedKV:
            pair = [jnp.array(stored) for _ in "kv"]
            return PagedKV(*pair, *(jnp.array(scales) for _ in "kv" if scaled))

        return [layer() for _ in range(layers)]

    def new(self, tokens: int, heads: int) -> jax.Array:
        rng = np.random.default_rng(1)
        values = rng.standard_normal((tokens, heads, self.head_dim), np.float32)
        return jnp.asarray(values.astype(self.dtype))


def tables_for(rows: int, context: int) -> tuple[jax.Array, int]:
    """Block tables of rows whose pages lie anywhere, and the number of blocks of the pool."""
    width = -(-context // BLOCK_SIZE)
    pages = 1 + np.random.default_rng(2).permutation(rows * width)
    return jnp.asarray(pages.reshape(rows, width).astype(np.int32)), rows * width + 1


def decode_case(shape: Shape, batch: int, context: int, layers: int) -> dict[ModuleType, Run]:
    tables, blocks = tables_for(batch, context)
    pools, q = shape.pools(blocks, layers), shape.new(batch, shape.heads)
    positions = jnp.full(batch, context - 1, jnp.int32)

    def step(module: ModuleType, q: jax.Array, pools: list[PagedKV]) -> jax.Array:
        for kv in pools:
            q = module.paged_decode(
                q, kv, tables, positions, block_size=BLOCK_SIZE, scale=shape.head_dim**-0.5
            )
        return q

    return _both(step, q, pools)


def prompt_case(shape: Shape, tokens: int, layers: int) -> dict[ModuleType, Run]:
    tables, blocks = tables_for(1, tokens)
    pools, q = shape.pools(blocks, layers), shape.new(tokens, shape.heads)

    def step(module: ModuleType, q: jax.Array, pools: list[PagedKV]) -> jax.Array:
        tile = ops.TILE if module is ops else reference.query_tile(shape.heads // shape.kv_heads)
        tiles = _tiles(tokens, tile)
        for kv in pools:
            q = module.paged_prefill(
                *(q, kv, tables, tiles),
                **{"tile": tile, "block_size": BLOCK_SIZE, "scale": shape.head_dim**-0.5},
            )
        return q

    return _both(step, q, pools)


def _tiles(tokens: int, tile: int) -> PrefillTiles:
    used = -(-tokens // tile)
    room = -(-used // 8) * 8
    start = np.arange(room, dtype=np.int32) * tile
    length = np.clip(tokens - start, 0, tile).astype(np.int32)
    place = np.arange(tokens, dtype=np.int32)  # tile index x tile + place in the tile
    return PrefillTiles(np.zeros(room, np.int32), start, length, start, place, jnp.int32(used))


def _both(step: Callable[..., Any], *arguments: Any) -> dict[ModuleType, Run]:
    def run(program: Callable[..., Any]) -> None:
        jax.block_until_ready(program(*arguments))

    programs = {module: jax.jit(functools.partial(step, module)) for module in (ops, reference)}
    return {module: functools.partial(run, program) for module, program in programs.items()}


def write_case(shape: Shape, tokens: int, layers: int) -> dict[ModuleType, Run]:
    slots = jnp.asarray(np.random.default_rng(3).permutation(4096)[:tokens].astype(np.int32))
    new = shape.new(tokens, shape.kv_heads)
    runs: dict[ModuleType, Run] = {}
    for module in (ops, reference):

        @functools.partial(jax.jit, donate_argnums=0)
        def step(pools: list[PagedKV], module: ModuleType = module) -> list[PagedKV]:
            return [module.write_kv(kv, new, new, slots) for kv in pools]

        state = {"pools": shape.pools(4096 // BLOCK_SIZE, layers)}

        def run(step: Any = step, state: dict[str, Any] = state) -> None:
            state["pools"] = jax.block_until_ready(step(state["pools"]))

        runs[module] = run
    return runs


def measure(runs: dict[ModuleType, Run], rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and the ratio."""
    times: dict[ModuleType, list[tuple[float, float]]] = {module: [] for module in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for module, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            times[module].append((time.perf_counter() - wall, time.process_time() - cpu))
    native, plain = times[ops], times[reference]
    return {
        "native_ms": statistics.median(wall for wall, _ in native) * 1e3,
        "native_cpu_ms": statistics.median(cpu for _, cpu in native) * 1e3,
        "reference_ms": statistics.median(wall for wall, _ in plain) * 1e3,
        "reference_cpu_ms": statistics.median(cpu for _, cpu in plain) * 1e3,
        "ratio": statistics.median(b[0] / a[0] for a, b in zip(native, plain, strict=True)),
        "cpu_ratio": statistics.median(b[1] / a[1] for a, b in zip(native, plain, strict=True)),
    }


def layers_for(wanted: int, layer_bytes: int) -> int:
    return max(1, min(wanted, MOST_BYTES // layer_bytes))


def cases(shape: Shape, wanted: int, *, quick: bool) -> Any:
    """(name, layers, runs, work of all layers, its unit) of each; work is in billions."""
    for batch, context in DECODE[:6:5] if quick else DECODE:
        size = batch * context * shape.token_bytes
        layers = layers_for(wanted, size)
        name = f"decode {batch} x {context}"
        yield name, layers, decode_case(shape, batch, context, layers), size * layers / 1e9, "GB/s"
    for tokens in PROMPTS[:1] if quick else PROMPTS:
        flops = 2 * tokens * (tokens + 1) * shape.heads * shape.head_dim * wanted
        yield f"prompt {tokens}", wanted, prompt_case(shape, tokens, wanted), flops / 1e9, "GFLOP/s"
    for tokens in WRITES[:1] if quick else WRITES:
        size = tokens * shape.token_bytes * wanted
        yield f"write {tokens}", wanted, write_case(shape, tokens, wanted), size / 1e9, "GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--cache", choices=["int8", "float8_e4m3fn"], help="an 8-bit cache")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="the smallest cases only")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    build.load(announce=print)
    dtype = jnp.dtype(args.dtype)
    cache = jnp.dtype(args.cache or args.dtype)
    shape = Shape(args.heads, args.kv_heads, args.head_dim, dtype, cache)
    print(f"{shape}, kernels for {build.isa()}")
    print(f"{'':16}{'layers':>7}{'native ms':>11}{'cpu':>8}{'plain ms':>11}{'cpu':>9}{'ratio':>8}")
    results = {}
    for name, layers, runs, work, unit in cases(shape, args.layers, quick=args.quick):
        found = measure(runs, args.rounds)
        rate = work / found["native_ms"] * 1e3
        results[name] = {**found, "layers": layers, unit: rate}
        print(
            f"{name:16}{layers:7}{found['native_ms']:11.2f}{found['native_cpu_ms']:8.1f}"
            f"{found['reference_ms']:11.1f}{found['reference_cpu_ms']:9.1f}{found['ratio']:7.1f}x"
            f"   {rate:.1f} {unit}",
            flush=True,
        )
    report = provenance("native", "bench_native.py", sys.argv[1:])
    publish({**report, "isa": build.isa(), "shape": str(shape), "results": results}, args.out)


if __name__ == "__main__":
    main()
