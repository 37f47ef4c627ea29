"""Kernels on several virtual CPU devices, each with some of the KV heads.

`run` starts this file as a program, because the number of devices has to be chosen before JAX
starts.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = 4
_ROOT = Path(__file__).resolve().parent.parent.parent


def run() -> list[str]:
    """What was compared, of which all was equal."""
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sharded"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    compared: list[str] = json.loads(ended.stdout)
    return compared


def _compare(name: str, cache_dtype: Any) -> str:
    """Writing, decode and prefill give each device's heads the bits that one device gives them."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from tests.kernels.attention_oracle import normal, tiles_for
    from tests.kernels.backends import Setup, backend

    found = backend(name)
    assert found is not None and found.prefill_kernel is not None
    setup = Setup(32, DEVICES, 2, 16, window=40, cache_dtype=cache_dtype)
    case = setup.case([5, 70, 33, 16])
    rng = np.random.default_rng(0)
    slots = np.array([*case.slots(1)[64:], -1, *case.slots(2)[:10]], np.int32)
    k, v = (normal(rng, (len(slots), DEVICES, 32)) for _ in range(2))
    tile = found.tile_size(setup.group)
    tiles = tiles_for([(2, 0, 33), (1, 60, 10)], tile=tile, num_tokens=43, num_tiles=8)
    positions = np.array([4, 69, 32, 15, -1], np.int32)
    tables = case.tables[[0, 1, 2, 3, 0]]
    decode_q, prompt_q = case.queries(5, rng), case.queries(43, rng)
    fixed: dict[str, Any] = {"block_size": 16, "scale": setup.scale, "window": setup.window}

    def step(kv: Any, k: Any, v: Any, decode_q: Any, prompt_q: Any) -> Any:
        kv = found.write_kernel.__wrapped__(kv, k, v, slots)
        decoded = found.decode_kernel.__wrapped__(decode_q, kv, tables, positions, **fixed)
        prefill = found.prefill_kernel.__wrapped__
        prompt = prefill(prompt_q, kv, case.tables, tiles.arrays, tile=tile, **fixed)
        return kv, decoded, prompt

    # The heads are the second axis of everything.
    heads = PartitionSpec(None, "model")
    mesh = Mesh(np.array(jax.devices()), ("model",))
    assert mesh.size == DEVICES
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=heads, out_specs=heads)
    arguments = case.kv(), k, v, decode_q, prompt_q
    whole, parts = jax.jit(step)(*arguments), jax.jit(over(step, check_vma=False))(*arguments)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert len(other.sharding.device_set) == DEVICES
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return f"{name} {np.dtype(cache_dtype or setup.dtype).name}"


def main() -> None:
    import numpy as np

    from tests.kernels.backends import backend

    names = [name for name in ("reference", "native", "triton") if backend(name) is not None]
    kinds = [(name, dtype) for name in names for dtype in (None, np.int8)]
    sys.stdout.write(json.dumps([_compare(*kind) for kind in kinds]))


if __name__ == "__main__":
    main()
