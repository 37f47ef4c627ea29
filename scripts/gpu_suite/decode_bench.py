"""Compiles and times decode cases."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_suite.compiling import Compiled, Program, compile_all
from gpu_suite.context import Context
from gpu_suite.decode_case import (
    DecodeCase,
    attention_of,
    first_tables,
    make_pool,
    next_tables,
    regions,
)
from gpu_suite.timing import Timing, feed, iterations_for, loop, time_program
from pallas_kernels.paged_kv import PagedKV


@dataclass(slots=True)
class DecodeBench:
    """Compiles and times decode cases; pools and empty loops are made once."""

    ctx: Context
    _pools: dict[tuple[Any, ...], PagedKV] = field(default_factory=dict)

    def iterations(self, case: DecodeCase) -> int:
        return iterations_for(case.floor_seconds + 4e-6, dry=self.ctx.dry)

    def shapes(self, case: DecodeCase) -> tuple[Any, ...]:
        """(zero, (q, tables), kv, positions), abstract."""
        heads = case.kv_heads * case.group
        q = jax.ShapeDtypeStruct((case.batch, heads, case.dim), jnp.bfloat16)
        tables = jax.ShapeDtypeStruct(case.table_shape, jnp.int32)
        kv = jax.eval_shape(functools.partial(make_pool, case, dry=self.ctx.dry))
        positions = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
        return jax.ShapeDtypeStruct((), jnp.float32), (q, tables), kv, positions

    def arguments(self, case: DecodeCase) -> tuple[Any, ...]:
        _, (q, _), _, _ = self.shapes(case)
        if case.pool_key not in self._pools:
            self._pools.clear()  # one at a time: cases of one pool stand together
            make = jax.jit(functools.partial(make_pool, case, dry=self.ctx.dry))
            self._pools[case.pool_key] = jax.block_until_ready(make())
        lengths = case.lengths or (case.context,) * case.batch
        return (
            jnp.zeros((), jnp.float32),
            (
                jnp.asarray(np.random.default_rng(1).standard_normal(q.shape, np.float32), q.dtype),
                jnp.asarray(first_tables(case, dry=self.ctx.dry)),
            ),
            self._pools[case.pool_key],
            jnp.asarray([n - 1 for n in lengths], jnp.int32),
        )

    def program(self, case: DecodeCase, attention: Any = None) -> Program:
        """`attention` replaces the case's kernel."""
        call = attention_of(case, dry=self.ctx.dry) if attention is None else attention

        def step(zero: Any, carry: Any, kv: PagedKV, positions: Any) -> Any:
            q, tables = carry
            out = call(q, kv, tables, positions)
            return feed(q, zero, out), next_tables(case, tables, dry=self.ctx.dry)

        looped = loop(step, self.iterations(case))
        return Program(case.name, looped, self.shapes(case), facts=case.facts())

    def empty_name(self, case: DecodeCase) -> str:
        heads = case.kv_heads * case.group
        sets = regions(case, dry=self.ctx.dry)
        kind = "identity" if case.order == "identity" else sets
        return (
            f"empty {case.batch}x{heads}x{case.dim} {case.table_shape[1]} {kind} "
            f"{self.iterations(case)}"
        )

    def empty(self, case: DecodeCase) -> Program:
        def step(zero: Any, carry: Any) -> Any:
            q, tables = carry
            return feed(q, zero, q), next_tables(case, tables, dry=self.ctx.dry)

        zero, carry, _, _ = self.shapes(case)
        return Program(self.empty_name(case), loop(step, self.iterations(case)), (zero, carry))

    def compile(self, cases: list[tuple[DecodeCase, Any]]) -> dict[str, Compiled]:
        programs: dict[str, Program] = {}
        for case, attention in cases:
            try:
                programs[case.name] = self.program(case, attention)
            except Exception as error:
                self.ctx.fail(case.name, error, stage="prepare")
                continue
            programs.setdefault(self.empty_name(case), self.empty(case))
        return compile_all(self.ctx, programs.values())

    def measure(self, case: DecodeCase, compiled: dict[str, Compiled]) -> float | None:
        """Seconds of one call, recorded; None if it could not be had."""
        ctx = self.ctx
        if case.name not in compiled:
            return None
        if ctx.late():
            ctx.skip(case.name)
            return None
        try:
            with ctx.watch(case.name):
                timing = self._time(case, compiled)
        except Exception as error:
            ctx.fail(case.name, error, stage="run", **case.facts())
            return None
        rate = case.kv_bytes / timing.seconds
        read = ctx.results.value("ceilings", "read", "tbps")
        ctx.row(
            case.name,
            us=timing.seconds * 1e6,
            tbps=rate / 1e12,
            of_read=None if read is None else rate / 1e12 / read,
            spread=timing.spread,
            iterations=timing.iterations,
            compile_s=compiled[case.name].seconds,
            **case.facts(),
        )
        return timing.seconds

    def _time(self, case: DecodeCase, compiled: dict[str, Compiled]) -> Timing:
        arguments, empty = self.arguments(case), self.empty_name(case)
        base = (compiled[empty], arguments[:2]) if empty in compiled else None
        return time_program(compiled[case.name], arguments, self.iterations(case), empty=base)
