"""Cases of all kernels in a process of their own: `run` starts this file as a program, with another
instruction set, number of threads or library than the test's own process has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parents[3]
LONG = [1300, 300, 257, 64]
"""Contexts of several parts."""


def run(*arguments: str | Path, threads: int | None = None, **environment: str) -> dict[str, Any]:
    """What the kernels call themselves ("isa"), and for each case the digest of its results, all of
    which were right. `arguments` are the program's, see `main`.
    """
    if threads is not None:
        environment["NPROC"] = environment["PJRT_NPROC"] = str(threads)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernels.native.kernel_runs", *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def only_level(name: str) -> None:
    """From now on in this process, libraries have kernels for no other instruction set."""
    from pallas_kernels.native import toolchain

    only = tuple(one for one in toolchain.instruction_sets() if one.name == name)
    toolchain.instruction_sets = lambda: only


def _digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in arrays)).hexdigest()[:16]


def _short(setup: Any) -> str:
    """Decode and prefill over contexts of up to 80 tokens, poison in all other slots."""
    from tests.kernels import test_attention_suite as suite

    found = suite.available("native")
    case = setup.case(suite.LENGTHS)
    jobs = suite.last_tokens(case)
    q, out = suite.decode(found, setup, case, jobs)
    suite.check(setup, case, q, out, jobs)
    prompt_q, prompt, tiles = suite.prefill(found, setup, case)
    suite.check(setup, case, prompt_q, prompt, tiles.tokens)
    return _digest(out, prompt)


def _long(setup: Any) -> str:
    """The same over contexts that are cut, by few rows, so that threads share them."""
    from tests.kernels import test_attention_suite as suite
    from tests.kernels.attention_oracle import tiles_for

    found = suite.available("native")
    case = setup.case(LONG)
    digests = []
    for jobs in ([(0, 1299)], [(0, 1299), (1, 299), (2, 256), (0, 1023)]):
        q, out = suite.decode(found, setup, case, jobs)
        suite.check(setup, case, q, out, jobs)
        digests.append(_digest(out))
    chunks = [(0, 1200, 100), (1, 0, 40), (2, 250, 7)]
    tiles = tiles_for(chunks, tile=found.tile_size(1), num_tokens=150, num_tiles=8)
    q = case.queries(150, np.random.default_rng(2))
    out = found.prefill(setup, q, case.kv(), case.tables, tiles)
    suite.check(setup, case, q, out, tiles.tokens)
    return _digest(*digests, out)


def _layers() -> str:
    """Products, norms and rotations of odd sizes with padding between, memory of exactly the size
    that is needed, and threads enough to share.
    """
    import jax.numpy as jnp

    from jaxpaged.models.routines import LiveRows
    from pallas_kernels.native.layers import NativeRoutines

    routines, results = NativeRoutines(), []
    rng = np.random.default_rng(3)
    for total, first, head, tail in ((9, 9, 9, 0), (77, 8, 3, 60), (400, 32, 31, 300)):
        live = LiveRows(jnp.asarray([head, tail], jnp.int32), first, total)
        rows = np.asarray(live.mask())
        for width, depth in ((1, 1), (50, 33), (97, 576)):
            x = jnp.asarray(rng.standard_normal((total, depth)), jnp.float32)
            weight = jnp.asarray(rng.standard_normal((2 * width, depth)), jnp.bfloat16)
            onto = jnp.asarray(rng.standard_normal((total, 2 * width)), jnp.float32)
            table = jnp.asarray(rng.standard_normal((2, total, depth // 2)), jnp.float32)
            heads = jnp.asarray(rng.standard_normal((total, 2, 3, depth)), jnp.float32)
            found = [routines.rms_norm(x, weight[0], eps=1e-5, offset=1.0, live=live)]
            found += routines.rotate(heads, table, jnp.bfloat16, live) or ()
            product = routines.product(x, weight, live)
            if product is not None:
                wide = np.asarray(x.astype(jnp.bfloat16), np.float64)
                exact = wide @ np.asarray(weight, np.float64).T
                np.testing.assert_allclose(np.asarray(product)[rows], exact[rows], atol=1e-3)
                gates = weight.reshape(width, 2, depth)
                found += [
                    product,
                    routines.product(x.astype(jnp.bfloat16), weight, live, onto=onto),
                    routines.gated_product(x, gates, "silu", live),
                ]
            results += [np.asarray(one)[rows] for one in found]
    assert all(np.isfinite(np.asarray(one, np.float32)).all() for one in results)
    return _digest(*results)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="where the library is")
    parser.add_argument("--level", help="the only instruction set that it has")
    args = parser.parse_args()

    from pallas_kernels.native import build

    if args.level:
        only_level(args.level)
    build.load(folder=args.folder)

    from pallas_kernels.pool_layout import PoolLayout
    from tests.kernels.backends import BF16, F8, SETUPS, Setup

    long = [
        Setup(64, 3, 3, 16, BF16),
        Setup(64, 2, 2, 16),
        Setup(80, 1, 5, 32, window=600, soft_cap=5.0),
        Setup(33, 2, 3, 8, BF16, window=300),
        Setup(64, 2, 4, 16, BF16, F8),
        Setup(128, 1, 4, 16, np.float16, np.int8, value_dim=96),
    ]
    digests = {str(setup): _short(setup) for setup in SETUPS if setup.layout is PoolLayout.NHD}
    digests |= {f"long {setup}": _long(setup) for setup in long}
    digests["layers"] = _layers()
    sys.stdout.write(json.dumps({"isa": build.isa(), "digests": digests}))


if __name__ == "__main__":
    main()
