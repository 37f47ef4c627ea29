"""Writing new K and V to their slots: our kernel beside XLA's scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_suite.backends import cache_dtype, kernel, write_config
from gpu_suite.compiling import Program, compile_all
from gpu_suite.context import Context
from gpu_suite.timing import iterations_for, loop, time_donating
from pallas_kernels.paged_kv import PagedKV

POOL_TOKENS = 2**18
STRIDE = 40_503
"""By which the slots move on from call to call; odd, so that they come through the whole pool."""


@dataclass(frozen=True, slots=True)
class WriteCase:
    tokens: int
    backend: str = "pallas_triton"
    cache: str | None = None
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"T{self.tokens} {self.cache or 'bf16'} {self.backend}"

    @property
    def bytes(self) -> int:
        """New values read, and stored."""
        each = jnp.dtype(cache_dtype(self.cache, "bfloat16")).itemsize
        stored = self.dim * each + (4 if self.cache else 0)
        return 2 * self.tokens * self.kv_heads * (2 * self.dim + stored)


def run(ctx: Context) -> None:
    cases = cases_of(dry=ctx.dry)
    programs: dict[str, Program] = {}
    for case in cases:
        try:
            programs[case.name] = _program(ctx, case)
        except Exception as error:
            ctx.fail(case.name, error, stage="prepare")
    compiled = compile_all(ctx, programs.values())
    for case in cases:
        if case.name not in compiled:
            continue
        if ctx.late():
            ctx.skip(case.name)
            continue
        try:
            program = compiled[case.name]
            zero, _, *rest = programs[case.name].arguments
            carry = (_pool(case, dry=ctx.dry), _slots(case, dry=ctx.dry))
            timing = time_donating(program, zero, carry, tuple(rest), _iterations(ctx, case))
        except Exception as error:
            ctx.fail(case.name, error, stage="run")
            continue
        ctx.row(
            case.name,
            us=timing.seconds * 1e6,
            gbps=case.bytes / timing.seconds / 1e9,
            spread=timing.spread,
            temporary_bytes=program.temporary_bytes,
            tokens=case.tokens,
            cache=case.cache or "bfloat16",
            backend=case.backend,
        )


def cases_of(*, dry: bool) -> list[WriteCase]:
    backends = ("pallas_triton", "reference")
    if dry:
        return [WriteCase(8, b, "fp8", kv_heads=2, dim=16, block_size=8) for b in backends]
    return [
        WriteCase(tokens, backend, cache)
        for tokens in (32, 2048, 1)
        for cache in (None, "int8", "fp8")
        for backend in backends
    ]


def _iterations(ctx: Context, case: WriteCase) -> int:
    return iterations_for(case.bytes / 2e12 + 6e-6, dry=ctx.dry)


def _slots_total(*, dry: bool) -> int:
    return 2**10 if dry else POOL_TOKENS


def _pool(case: WriteCase, *, dry: bool) -> PagedKV:
    """Zeros: what is written over does not matter to a write."""
    shape = (_slots_total(dry=dry), case.kv_heads, case.dim)
    dtype = cache_dtype(case.cache, "bfloat16")
    scales = [jnp.zeros(shape[:2], jnp.float32) if case.cache else None for _ in range(2)]
    return PagedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales[0], scales[1])


def _slots(case: WriteCase, *, dry: bool) -> Any:
    order = np.random.default_rng(3).permutation(_slots_total(dry=dry))
    return jnp.asarray(order[: case.tokens], jnp.int32)


def _values(case: WriteCase) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(9), 2)
    shape = (case.tokens, case.kv_heads, case.dim)
    return (
        jax.random.normal(keys[0], shape, jnp.bfloat16),
        jax.random.normal(keys[1], shape, jnp.bfloat16),
    )


def _program(ctx: Context, case: WriteCase) -> Program:
    config = write_config(
        tokens=case.tokens,
        kv_heads=case.kv_heads,
        dim=case.dim,
        block_size=case.block_size,
        dtype="bfloat16",
        cache=case.cache,
    )
    function = kernel(case.backend, "write", dry=ctx.dry, config=config)
    total = _slots_total(dry=ctx.dry)

    def step(zero: Any, carry: Any, k: Any, v: Any) -> Any:
        kv, slots = carry
        return function(kv, k, v, slots), (slots + STRIDE) % total

    carry = jax.eval_shape(lambda: (_pool(case, dry=ctx.dry), jnp.zeros((case.tokens,), jnp.int32)))
    arguments = (jnp.zeros((), jnp.float32), carry, *_values(case))
    return Program(case.name, loop(step, _iterations(ctx, case)), arguments, donate=(1,))
