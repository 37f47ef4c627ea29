"""What the device can do at most: the numbers that all others are shares of."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gpu_suite.compiling import Program, compile_all
from gpu_suite.context import Context
from gpu_suite.timing import loop, time_program

READ_BYTES = 4 * 2**30
COPY_BYTES = 2 * 2**30
MATMUL = 8192
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "torch",
    "transformers",
    "triton",
)
SMI_FIELDS = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,"
    "temperature.gpu,utilization.gpu"
)


def run(ctx: Context) -> None:
    ctx.row("environment", **environment())
    _memory(ctx)
    _matmul(ctx)
    ctx.row("device after", nvidia_smi=nvidia_smi())


def environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "nvidia_smi": nvidia_smi(),
        "versions": versions,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def nvidia_smi() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout or done.stderr).strip()[:300]


def commit() -> str | None:
    """Of the checkout, where there is one; git's own word, else what its files say."""
    root = Path(__file__).resolve().parents[2]
    if shutil.which("git") is not None:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    try:
        head = (root / ".git" / "HEAD").read_text().strip()
        branch = head.removeprefix("ref: ")
        return head if branch == head else (root / ".git" / branch).read_text().strip()
    except OSError:
        return None


def _memory(ctx: Context) -> None:
    side = 2**8 if ctx.dry else 2**15
    rows = READ_BYTES // 4 // side if not ctx.dry else side
    x = jax.jit(lambda key: jax.random.normal(key, (rows, side), jnp.float32))(jax.random.key(0))
    size, iterations = x.nbytes, 2 if ctx.dry else 10
    zero = jnp.zeros((), jnp.float32)

    def read_rows(zero: Any, carry: Any, x: Any) -> Any:
        return jnp.sum(x + zero * carry[0], axis=1)

    def read_all(zero: Any, carry: Any, x: Any) -> Any:
        return jnp.full_like(carry, jnp.sum(x + zero * carry[0]))

    def read_words(zero: Any, carry: Any, x: Any) -> Any:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        most = jnp.max(words ^ (zero * carry[0]).astype(jnp.uint32), axis=1)
        return most.astype(jnp.float32)

    reads = {"read rows": read_rows, "read all": read_all, "read words": read_words}
    start = jnp.zeros((rows,), jnp.float32)
    programs = [
        Program(name, loop(function, iterations), (zero, start, x))
        for name, function in reads.items()
    ]
    half = x[: rows // 2]
    programs.append(Program("copy", loop(lambda zero, y: y + zero, iterations), (zero, half)))
    compiled = compile_all(ctx, programs)
    best = 0.0
    for program in programs:
        if program.name not in compiled:
            continue
        timing = time_program(compiled[program.name], program.arguments, iterations)
        moved = 2 * half.nbytes if program.name == "copy" else size
        rate = moved / timing.seconds
        if program.name != "copy":
            best = max(best, rate)
        ctx.row(
            program.name,
            us=timing.seconds * 1e6,
            bytes=moved,
            tbps=rate / 1e12,
            spread=timing.spread,
        )
    if best:
        ctx.row("read", tbps=best / 1e12)


def _matmul(ctx: Context) -> None:
    size, iterations = (128, 2) if ctx.dry else (MATMUL, 8)
    keys = jax.random.split(jax.random.key(1), 2)
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    zero = jnp.zeros((), jnp.float32)

    def multiply(zero: Any, carry: Any, b: Any) -> Any:
        a, c = carry
        c = a @ b
        return a + (zero * c[0, 0].astype(jnp.float32)).astype(a.dtype), c

    def nothing(zero: Any, carry: Any, b: Any) -> Any:
        a, c = carry
        return a + (zero * a[0, 0].astype(jnp.float32)).astype(a.dtype), c

    arguments = (zero, (a, jnp.zeros_like(a)), b)
    programs = [
        Program("matmul", loop(multiply, iterations), arguments),
        Program("matmul empty", loop(nothing, iterations), arguments),
    ]
    compiled = compile_all(ctx, programs)
    if len(compiled) == 2:
        timing = time_program(
            compiled["matmul"], arguments, iterations, empty=(compiled["matmul empty"], arguments)
        )
        rate = 2 * size**3 / timing.seconds
        ctx.row("matmul", us=timing.seconds * 1e6, tflops=rate / 1e12, spread=timing.spread)
