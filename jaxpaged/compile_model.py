"""`jaxpaged compile`: a model's programs, compiled ahead of time into a folder."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from jaxpaged import flags
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError, JaxpagedError

EXIT_FAILED = 1
EPILOG = """\
MODEL is a folder, a .gguf file, a hub id, or the alias of the embedded model; its weights are not
read. Give the engine's flags that later starts will have. With --compiled DIR these load the
programs and compile nothing; they are refused if anything differs from which other programs would
follow: versions, the source code, the device, the model's shapes, flags, the number of KV blocks.
Loading such a folder runs the code in it: take none from people whom you would not let run programs
of theirs. It must belong to you or to root, and nobody else may be able to write to it.
Exit status: 0, 1 when writing failed, 2 for wrong arguments or a MODEL that cannot be used.
"""
_NO_USE = frozenset({"model", "compiled", "enforce_eager", "record"})


class CompileError(JaxpagedError):
    """The folder could not be written."""


def add_parser(commands: Any) -> None:
    """Add `compile` to the commands of `jaxpaged`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile",
        help="compile a model's programs ahead of time",
        usage="jaxpaged compile MODEL --out DIR [flags]",
        description="Compile a model's programs ahead of time, for quick starts later.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("compile_model", metavar="MODEL", help="the model")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="where to; an older artefact is replaced"
    )
    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    flags.add_flags(
        parser, EngineConfig, "engine", only=[name for name in fields if name not in _NO_USE]
    )
    parser.set_defaults(command=run_compile)


def run_compile(args: argparse.Namespace) -> int:
    """Raises `ConfigError` or `ModelLoadError` for what cannot be compiled."""
    settings = flags.given(args, EngineConfig)
    config = EngineConfig.from_dict({**settings, "model": args.compile_model})
    out = Path(args.out).expanduser()
    check_out(out)
    if config.num_processes > 1:
        raise ConfigError(
            f"num_processes={config.num_processes}: programs of several processes cannot be "
            "compiled ahead of time; leave it out."
        )
    try:
        sys.stderr.write(compile_into(out, config) + "\n")
    except CompileError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


def check_out(out: Path) -> None:
    """Raises `ConfigError` for what would be replaced though it is no artefact."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "manifest.json").exists()):
        raise ConfigError(f"--out {out} exists and is no folder of this command's; name another.")


def compile_into(out: Path, config: EngineConfig) -> str:
    """Write the folder. Returns a line that says what was done.

    Nothing comes from a cache: what XLA loads from its own cannot be serialised again.
    """
    from jaxpaged import blueprint, startup  # start JAX
    from jaxpaged.device import executables
    from jaxpaged.device.compile_ledger import without_cache

    start = time.perf_counter()
    startup.show_log(config)
    with without_cache():
        made = blueprint.draw_up(dataclasses.replace(config, compile_cache_dir=""))
        startup.prepare(config, made, lambda done, total, program: None)
    try:
        size = executables.write(out, made.manifest(), made.programs.compiled_here)
    except (OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CompileError(f"--out {out}: {error}") from error
    count = len(made.programs.names)
    return (
        f"Wrote {count} programs ({size / 2**20:.1f} MiB, {made.plan.num_blocks} KV blocks) to "
        f"{out} in {time.perf_counter() - start:.1f} s. Start with --compiled {out} and the same "
        "flags."
    )
