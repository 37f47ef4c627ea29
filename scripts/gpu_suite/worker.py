"""One process of a run: its sections, one after the other. Started by `supervisor`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from gpu_suite.context import LONGEST_TEXT, Context, DeviceLostError
from gpu_suite.results import Results
from gpu_suite.sections import BY_NAME

NO_DEVICE = 3
"""Exit status where there is no GPU and the run is not dry."""
DEVICE_LOST = 4
"""Exit status after an error that only a new process recovers from."""


def prepare_jax(cache: Path) -> str:
    """Returns the platform of the default device."""
    import jax

    cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.filterwarnings("ignore", message=".*Triton.*deprecated.*")
    platform: str = jax.default_backend()
    return platform


def run_section(ctx: Context, module: str) -> None:
    """Whatever goes wrong in it is recorded. Raises `DeviceLostError` only."""
    begun = time.monotonic()
    ctx.row(ctx.section, "start", limit_s=ctx.seconds_left())
    lost: DeviceLostError | None = None
    try:
        import_module(f"gpu_suite.{module}").run(ctx)
    except DeviceLostError as error:
        lost = error
        ctx.row(ctx.section, "error", error=str(error))
    except Exception as error:
        text = traceback.format_exc()
        ctx.row(ctx.section, "error", error=repr(error)[:500], traceback=text[-LONGEST_TEXT:])
    ctx.row(ctx.section, "end", seconds=time.monotonic() - begun)
    if lost is not None:
        raise lost


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", required=True, help="NAME=SECONDS,...")
    parser.add_argument("--until", type=float, required=True, help="monotonic seconds")
    parser.add_argument("--origin", type=float, required=True, help="monotonic seconds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    results = Results(args.out, args.origin)
    asked = [part.split("=") for part in args.sections.split(",")]
    if any(BY_NAME[name].module != "peer" for name, _ in asked):
        platform = prepare_jax(args.cache)
        if platform != "gpu" and not args.dry:
            results.row("run", "device", "error", error=f"JAX sees no GPU but {platform}")
            return NO_DEVICE
    for name, seconds in asked:
        section = BY_NAME[name]
        deadline = min(args.until, time.monotonic() + float(seconds))
        ctx = Context(name, results, deadline, args.dry, args.cache)
        if ctx.late(0.0 if args.dry else section.least):
            results.row(name, name, "skipped", reason="no time left")
            continue
        try:
            run_section(ctx, section.module)
        except DeviceLostError:
            return DEVICE_LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
