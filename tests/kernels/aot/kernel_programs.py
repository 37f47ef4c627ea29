"""The kernels at production sizes: every entry of the tuning table, and some variants."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import (
    mosaic_decode,
    mosaic_prefill,
    triton_decode,
    triton_prefill,
    triton_write,
    tuning,
)
from pallas_kernels.paged_kv import PagedKV, PrefillTiles, is_8_bit
from pallas_kernels.pool_layout import PoolLayout
from pallas_kernels.tuning import (
    DecodeConfig,
    Entry,
    KernelConfig,
    PrefillConfig,
    TuningTable,
    WriteConfig,
)
from tests.kernels.aot.program import DEVICE_KIND, Program, lower_function

FULL_BATCH = 256
"""Rows that fill the device without splits, whatever the model."""
SMALL_BATCH = 8
PROMPT_TOKENS = 2048
CONTEXT = 8192
_POOL_ELEMENTS = 2**29
"""Of K: 1 GiB in 16 bits, far more than any temporary."""
_ROWS = 32
"""Of the block table of a step with prompts."""
_MODELS = {64: (4, 8), 80: (1, 32), 96: (1, 32), 128: (4, 8), 192: (8, 8), 256: (2, 8)}
"""head_dim -> (group, kv_heads) of a model that has it: Llama 3.2 1B, Phi-2, Phi-3 mini, Llama 3
8B, Nemotron 4 340B, Gemma 2 9B."""
_LATENT = (128, 1)
"""DeepSeek V3."""
_BACKENDS: dict[str, dict[str, Any]] = {
    "pallas_triton": {
        "decode": triton_decode.paged_decode,
        "prefill": triton_prefill.paged_prefill,
        "tile_size": triton_prefill.tile_size,
        "write": triton_write.write_kv,
    },
    "pallas_mosaic": {
        "decode": mosaic_decode.paged_decode,
        "prefill": mosaic_prefill.paged_prefill,
        "tile_size": mosaic_prefill.tile_size,
    },
}


@dataclass(frozen=True)
class Sizes:
    """Of one call of a kernel."""

    head_dim: int = 128
    value_dim: int = 128
    group: int = 4
    kv_heads: int = 8
    block_size: int = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    batch: int = FULL_BATCH
    context: int = CONTEXT
    window: int | None = None
    soft_cap: float | None = None
    layout: PoolLayout = PoolLayout.NHD

    @property
    def latent(self) -> bool:
        return self.value_dim != self.head_dim

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "value_dim": self.value_dim if self.latent else None,
            "layout": self.layout,
        }

    def heads(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Queries of some tokens."""
        shape = (tokens, self.group * self.kv_heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.q_dtype))

    def tables(self, rows: int) -> jax.ShapeDtypeStruct:
        return _ints(rows, -(-self.context // self.block_size))

    def cache(self) -> PagedKV:
        dtype = jnp.dtype(self.kv_dtype)
        blocks = _POOL_ELEMENTS // (self.kv_heads * self.head_dim * self.block_size)
        shape = self.layout.shape(blocks, self.block_size, self.kv_heads, self.head_dim)
        pool: Any = jax.ShapeDtypeStruct(shape, dtype)
        scale: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32) if is_8_bit(dtype) else None
        if self.latent or self.layout is PoolLayout.COMBINED:
            return PagedKV(pool, None, scale, None)
        return PagedKV(pool, pool, scale, scale)

    def __str__(self) -> str:
        dim = f"{self.value_dim}+{self.head_dim - self.value_dim}" if self.latent else self.head_dim
        parts = [f"D{dim} G{self.group} K{self.kv_heads}", f"block {self.block_size}"]
        parts += [self.kv_dtype] + ([] if self.q_dtype == "bfloat16" else [f"q {self.q_dtype}"])
        parts += [] if self.window is None else [f"window {self.window}"]
        parts += [] if self.soft_cap is None else [f"cap {self.soft_cap:g}"]
        parts += [] if self.layout is PoolLayout.NHD else [self.layout.name]
        return ", ".join([*parts, f"B{self.batch}"])


def kernel_programs(table: TuningTable | None = None) -> list[Program]:
    """`table` takes the place of the package's own, and leaves the variants out."""
    entries = (table or tuning.builtin_table()).entries
    programs = [p for entry in entries if entry.device == DEVICE_KIND for p in of_entry(entry)]
    return programs if table is not None else [*programs, *variants()]


def of_entry(entry: Entry) -> list[Program]:
    """The entry's kernel; two of them where it is compiled in two ways."""
    latent = entry.value_dim not in (None, entry.head_dim)
    group, kv_heads = _LATENT if latent else _MODELS.get(entry.head_dim, (4, 8))
    decodes = entry.kernel == "decode"
    sizes = Sizes(
        head_dim=entry.head_dim,
        value_dim=entry.value_dim or entry.head_dim,
        group=min(group, entry.group or group),
        kv_heads=entry.kv_heads or kv_heads,
        block_size=entry.block_size or 16,
        q_dtype="float32" if entry.kv_dtype == "float32" else "bfloat16",
        kv_dtype=entry.kv_dtype,
        batch=entry.batch or (FULL_BATCH if decodes else PROMPT_TOKENS),
        context=entry.context or CONTEXT,
    )
    name = entry.kernel + ("" if entry.backend == "pallas_triton" else "-mosaic")
    name += f"-d{entry.head_dim}-{entry.kv_dtype}"
    for key in ("group", "kv_heads", "block_size", "batch", "context"):
        value = getattr(entry, key)
        name += "" if value is None else f"-{key.replace('_', '')}{value}"
    if isinstance(entry.config, PrefillConfig):
        return [prefill(name, sizes, entry.config, entry)]
    if isinstance(entry.config, WriteConfig):
        return [write(name, sizes, entry.config, entry)]
    if not entry.splits_from_rule:
        return [decode(name, sizes, entry.config, entry)]
    # Unsplit the kernel writes its result, split it writes float32 parts.
    small = dataclasses.replace(sizes, batch=min(SMALL_BATCH, sizes.batch))
    programs = {}
    for one in (sizes, small):
        config = _with_splits(entry, one)
        programs[config.splits] = decode(f"{name}-splits{config.splits}", one, config, entry)
    return list(programs.values())


def _with_splits(entry: Entry, sizes: Sizes) -> DecodeConfig:
    key = _key(sizes) | {"batch": sizes.batch, "backend": entry.backend}
    return tuning.decode_config(DEVICE_KIND, table=TuningTable((entry,)), **key)


def variants() -> list[Program]:
    """What no entry of the table shows: masks, layouts, other types, devices without entries."""
    gemma = Sizes(head_dim=256, value_dim=256, group=2, window=4096, soft_cap=50.0)
    full = Sizes(q_dtype="float32", kv_dtype="float32")
    programs = [
        decode("decode-window-cap", gemma, _looked_up(gemma)),
        decode("decode-page128", page := Sizes(block_size=128), _looked_up(page)),
        decode("decode-hnd", hnd := Sizes(layout=PoolLayout.HND), _looked_up(hnd)),
        decode("decode-combined", both := Sizes(layout=PoolLayout.COMBINED), _looked_up(both)),
        decode("decode-float32", full, _looked_up(full)),
        decode("decode-default", Sizes(), _looked_up(Sizes(), "another GPU")),
        prefill("prefill-window-cap", gemma, _prefill_looked_up(gemma)),
        prefill("prefill-hnd", hnd, _prefill_looked_up(hnd)),
        prefill("prefill-float32", full, _prefill_looked_up(full)),
        prefill("prefill-default", Sizes(), _prefill_looked_up(Sizes(), "another GPU")),
        write("write-hnd", hnd, WriteConfig()),
    ]
    return programs + _mosaic_variants(gemma)


def _mosaic_variants(gemma: Sizes) -> list[Program]:
    wide = Sizes(block_size=32, layout=PoolLayout.HND)
    masked = dataclasses.replace(wide, window=512, soft_cap=30.0)
    split = DecodeConfig(block_kv=128, num_stages=3, splits=8)
    whole = DecodeConfig(block_kv=64, num_stages=2, splits=1)
    two = PrefillConfig(block_rows=128, block_kv=128, num_stages=2)
    return [
        decode("decode-mosaic-tile128-hnd", wide, split, _mosaic(wide, "decode", split)),
        decode("decode-mosaic-window-cap", gemma, whole, _mosaic(gemma, "decode", whole)),
        prefill("prefill-mosaic-window-cap", masked, two, _mosaic(masked, "prefill", two)),
    ]


def _mosaic(sizes: Sizes, kernel: str, config: KernelConfig) -> Entry:
    return Entry(
        kernel=kernel,
        device=DEVICE_KIND,
        head_dim=sizes.head_dim,
        kv_dtype=sizes.kv_dtype,
        config=config,
        backend="pallas_mosaic",
    )


def faulty() -> list[Program]:
    """What the gate has to see: pools that are not donated, and registers that do not suffice."""
    kept = write("faulty-kept-pools", Sizes(), WriteConfig(), donate=False)
    crowded = PrefillConfig(block_rows=128, block_kv=64, num_warps=4, num_stages=3)
    return [kept, prefill("faulty-spills", Sizes(), crowded)]


def _key(sizes: Sizes) -> dict[str, Any]:
    names = ("head_dim", "value_dim", "group", "kv_heads", "block_size", "q_dtype", "kv_dtype")
    return {name: getattr(sizes, name) for name in names} | {"context": sizes.context}


def _looked_up(sizes: Sizes, device: str = DEVICE_KIND) -> DecodeConfig:
    return tuning.decode_config(device, batch=sizes.batch, **_key(sizes))


def _prefill_looked_up(sizes: Sizes, device: str = DEVICE_KIND) -> PrefillConfig:
    return tuning.prefill_config(device, tokens=PROMPT_TOKENS, **_key(sizes))


# ---------------------------------------------------------------------------- the three kernels


def decode(name: str, sizes: Sizes, config: DecodeConfig, entry: Entry | None = None) -> Program:
    kernel = functools.partial(_kernel(entry, "decode"), config=config, **sizes.settings)
    arguments = [
        sizes.heads(sizes.batch),
        cache := sizes.cache(),
        sizes.tables(sizes.batch),
        _ints(sizes.batch),
    ]
    return _program(name, "decode", kernel, arguments, cache, sizes, config, entry)


def prefill(name: str, sizes: Sizes, config: PrefillConfig, entry: Entry | None = None) -> Program:
    sizes = dataclasses.replace(
        sizes, batch=entry.batch if entry and entry.batch else PROMPT_TOKENS
    )
    tile = _kernel(entry, "tile_size")(sizes.group, config)
    kernel = functools.partial(
        _kernel(entry, "prefill"), config=config, tile=tile, **sizes.settings
    )
    count = sizes.batch // tile + _ROWS
    one = _ints(count)
    tiles: Any = PrefillTiles(one, one, one, one, _ints(sizes.batch), _ints())
    arguments = [sizes.heads(sizes.batch), cache := sizes.cache(), sizes.tables(_ROWS), tiles]
    return _program(name, "prefill", kernel, arguments, cache, sizes, config, entry)


def write(
    name: str,
    sizes: Sizes,
    config: WriteConfig,
    entry: Entry | None = None,
    *,
    donate: bool = True,
) -> Program:
    def kernel(*arguments: Any) -> PagedKV:
        return write_kv(*arguments, config=config, layout=sizes.layout)

    write_kv = _kernel(entry, "write")
    new = jax.ShapeDtypeStruct(
        (sizes.batch, sizes.kv_heads, sizes.head_dim), jnp.dtype(sizes.q_dtype)
    )
    arguments = [cache := sizes.cache(), new, None if sizes.latent else new, _ints(sizes.batch)]
    return _program(name, "write", kernel, arguments, cache, sizes, config, entry, donate=donate)


def _kernel(entry: Entry | None, name: str) -> Any:
    return _BACKENDS["pallas_triton" if entry is None else entry.backend][name]


def _program(
    name: str,
    kind: str,
    kernel: Any,
    arguments: list[Any],
    cache: PagedKV,
    sizes: Sizes,
    config: Any,
    entry: Entry | None,
    *,
    donate: bool = False,
) -> Program:
    def lower(mesh: Mesh) -> Any:
        def program(*given: Any) -> Any:
            return kernel(*given)

        program.__name__ = name.replace("-", "_")
        return lower_function(mesh, program, arguments, (0,) if donate else ())

    return Program(
        name=name,
        kind=kind,
        lower=lower,
        pools=jax.tree.leaves(cache),
        in_place=donate,
        shape=str(sizes),
        config=_short(config),
        entry=entry,
    )


def _short(config: Any) -> str:
    letters = {"block_rows": "BM", "block_kv": "BN", "block_tokens": "BT", "num_warps": "w"}
    letters |= {"num_stages": "s", "splits": "splits "}
    fields = dataclasses.asdict(config)
    return " ".join(f"{letters[name]}{fields[name]}" for name in letters if name in fields)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
