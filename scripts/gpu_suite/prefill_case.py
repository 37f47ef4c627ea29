"""One timed prefill: chunks of prompts over their past context, and its program."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_suite.backends import kernel, prefill_config, prefill_tile
from gpu_suite.cases import make_tiles
from gpu_suite.compiling import Compiled, Program, compile_all
from gpu_suite.context import Context
from gpu_suite.timing import feed, iterations_for, loop, time_program
from pallas_kernels.paged_kv import PagedKV

POOL_TOKENS = 2**17
MATMUL_RATE = 6e14
"""FLOP a second, to guess how often a program must call."""


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """`chunks` are (past, new tokens) of each sequence."""

    chunks: tuple[tuple[int, int], ...]
    group: int = 4
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    cache: str | None = None
    backend: str = "pallas_triton"
    config: Any = None
    label: str = ""

    @property
    def name(self) -> str:
        past, new = self.chunks[0]
        count = f"{len(self.chunks)}x" if len(self.chunks) > 1 else ""
        shape = f"chunk {count}{new} past{past} G{self.group}"
        if (self.kv_heads, self.dim) != (8, 128):
            shape += f" K{self.kv_heads} D{self.dim}"
        return " ".join(part for part in (shape, self.cache or "bf16", self.label) if part)

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.chunks)

    @property
    def context(self) -> int:
        return max(past + new for past, new in self.chunks)

    @property
    def flops(self) -> int:
        """Of the two products, for what causal masking leaves."""
        pairs = sum(new * past + new * (new + 1) // 2 for past, new in self.chunks)
        return 4 * pairs * self.kv_heads * self.group * self.dim

    def chosen_config(self) -> Any:
        if self.config is not None:
            return self.config
        return prefill_config(
            tokens=self.tokens,
            context=self.context,
            group=self.group,
            kv_heads=self.kv_heads,
            dim=self.dim,
            block_size=self.block_size,
            dtype="bfloat16",
            cache=self.cache,
            backend=self.backend,
        )

    def facts(self) -> dict[str, Any]:
        return {
            "chunks": [list(chunk) for chunk in self.chunks],
            "group": self.group,
            "kv_heads": self.kv_heads,
            "dim": self.dim,
            "block_size": self.block_size,
            "cache": self.cache or "bfloat16",
            "backend": self.backend,
            "flops": self.flops,
            "config": dataclasses.asdict(self.chosen_config()),
        }


@dataclass(slots=True)
class PrefillBench:
    """Compiles and times prefill cases; pools are made once."""

    ctx: Context
    _pools: dict[tuple[Any, ...], PagedKV] = field(default_factory=dict)

    def _kv(self, case: PrefillCase) -> PagedKV:
        key = (case.cache, case.kv_heads, case.dim)
        if key not in self._pools:
            slots = 2**10 if self.ctx.dry else POOL_TOKENS
            shape = (slots, case.kv_heads, case.dim)
            keys = jax.random.split(jax.random.key(11), 4)
            pools = [_pool(k, shape, case.cache) for k in keys[:2]]
            scales = [
                jax.random.uniform(k, shape[:2], jnp.float32, 0.01, 0.02) if case.cache else None
                for k in keys[2:]
            ]
            self._pools[key] = PagedKV(pools[0], pools[1], scales[0], scales[1])
        return self._pools[key]

    def program(self, case: PrefillCase) -> Program:
        config = case.chosen_config()
        tile = prefill_tile(case.backend, case.group, config)
        tiles, tokens = make_tiles(case.chunks, tile)
        kv = self._kv(case)
        width = -(-case.context // case.block_size)
        blocks = kv.k.shape[0] // case.block_size
        order = np.random.default_rng(1).permutation(blocks)[: len(case.chunks) * width]
        tables = jnp.asarray(order.reshape(len(case.chunks), width), jnp.int32)
        function = kernel(case.backend, "prefill", dry=self.ctx.dry, config=config)

        def step(zero: Any, q: Any, kv: Any, tables: Any, tiles: Any) -> Any:
            out = function(
                q,
                kv,
                tables,
                tiles,
                tile=tile,
                block_size=case.block_size,
                scale=case.dim**-0.5,
            )
            return feed(q, zero, out)

        shape = (tokens, case.kv_heads * case.group, case.dim)
        values = np.random.default_rng(2).standard_normal(shape, np.float32)
        q = jnp.asarray(values, jnp.bfloat16)
        arguments = (jnp.zeros((), jnp.float32), q, kv, tables, tiles)
        return Program(case.name, loop(step, self.iterations(case)), arguments, facts=case.facts())

    def iterations(self, case: PrefillCase) -> int:
        return iterations_for(case.flops / MATMUL_RATE, dry=self.ctx.dry)

    def run(self, cases: list[PrefillCase]) -> dict[str, float]:
        """Seconds of a call by name, recorded."""
        programs: dict[str, Program] = {}
        for case in cases:
            try:
                programs[case.name] = self.program(case)
            except Exception as error:
                self.ctx.fail(case.name, error, stage="prepare")
        empties = {
            name: Program(
                f"empty {name}",
                loop(lambda zero, q: feed(q, zero, q), self.iterations(case)),
                programs[name].arguments[:2],
            )
            for case in cases
            if (name := case.name) in programs
        }
        compiled = compile_all(self.ctx, [*programs.values(), *empties.values()])
        seconds: dict[str, float] = {}
        for case in cases:
            if case.name not in compiled:
                continue
            if self.ctx.late():
                self.ctx.skip(case.name)
                continue
            base = compiled.get(f"empty {case.name}")
            try:
                with self.ctx.watch(case.name):
                    measured = self._measure(case, programs[case.name], compiled[case.name], base)
                seconds[case.name] = measured
            except Exception as error:
                self.ctx.fail(case.name, error, stage="run", **case.facts())
        return seconds

    def _measure(
        self, case: PrefillCase, program: Program, compiled: Compiled, base: Compiled | None
    ) -> float:
        arguments = program.arguments
        empty = None if base is None else (base, arguments[:2])
        timing = time_program(compiled, arguments, self.iterations(case), empty=empty)
        rate = case.flops / timing.seconds / 1e12
        top = self.ctx.results.value("ceilings", "matmul", "tflops")
        self.ctx.row(
            case.name,
            us=timing.seconds * 1e6,
            tflops=rate,
            of_matmul=None if top is None else rate / top,
            spread=timing.spread,
            compile_s=compiled.seconds,
            **case.facts(),
        )
        return timing.seconds


def _pool(key: Any, shape: tuple[int, ...], cache: str | None) -> Any:
    if cache == "int8":
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    values = jax.random.normal(key, shape, jnp.bfloat16)
    return values.astype(jnp.float8_e4m3fn) if cache == "fp8" else values
