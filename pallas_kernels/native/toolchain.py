"""The C++ compiler of the system, and how it makes the library of native kernels.

`setup.py` uses this module, too, so it imports nothing beyond the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = "kernels.cc"
"""Compiled once for each instruction set; all other sources once, for every processor."""
COMPILERS = ("c++", "g++", "clang++")
"""Looked for in this order."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
COMPILE_SECONDS = 300.0
"""No object takes a tenth of it."""
_VERSION_SECONDS = 30.0
_TOLD_LINES = 3
"""Lines of a compiler's complaint that are passed on."""


class NativeUnavailable(RuntimeError):
    """The native kernels cannot run here. The message is a sentence: what is missing, and how to
    get it.
    """


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`name` is the namespace of its kernels; `flags` let the compiler use it."""

    name: str
    flags: tuple[str, ...]


_V2 = ("-msse4.2", "-mpopcnt")
_V3 = (*_V2, "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
_V4 = (*_V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
X86_64 = (
    InstructionSet("v2", _V2),
    InstructionSet("v3", _V3),
    InstructionSet("v4", _V4),
    InstructionSet("v4_bf16", (*_V4, "-mavx512bf16")),
)
"""Each has all of those before it. Spelled out, because -march=x86-64-v3 is unknown to compilers
of 2020.
"""
BASELINE = (InstructionSet("baseline", ()),)
"""On other processors: what every one of the kind can do."""


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Those of this kind of processor, the lowest first."""
    return X86_64 if platform.machine().lower() in ("x86_64", "amd64") else BASELINE


@dataclass(frozen=True, slots=True)
class Compiler:
    """`command` runs it; `version` is what it says of itself."""

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Changes with its version, and not with where it lies."""
        return digest(self.version.encode())


def digest(*parts: bytes) -> str:
    """Of bytes, the bounds between them included: 16 hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:16]


def sources() -> list[Path]:
    return sorted(HERE.glob("*.cc"))


def source_key(include: Path) -> str:
    """Changes with everything but the compiler that goes into a library: our sources, the flags,
    the headers of jaxlib in `include`, the kind of machine.
    """
    files = [*sources(), *sorted(HERE.glob("*.h")), *sorted(include.rglob("*.h"))]
    kind = f"{sys.platform} {platform.machine()} {FLAGS} {instruction_sets()}"
    return digest(kind.encode(), *(path.read_bytes() for path in files))


def find_compiler(given: str | None = None) -> Compiler:
    """`given`, a command with or without arguments, or else the first of `COMPILERS` that is there.

    Raises `NativeUnavailable` if there is none, or it does not run.
    """
    words = tuple(shlex.split(given or ""))
    names = words[:1] or COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise NativeUnavailable(
            f"the C++ compiler that $CXX names, {names[0]!r}, was not found; correct or unset it"
            if words
            else f"no C++ compiler was found ({', '.join(COMPILERS)}); {_how_to_get_one()}"
        )
    command = (found, *words[1:])
    try:
        told = _run([*command, "--version"], _VERSION_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(
            f"the C++ compiler {shlex.join(command)} does not run ({_reason(error)}); "
            f"{_how_to_get_one()}"
        ) from error
    return Compiler(command, told)


def _how_to_get_one() -> str:
    if sys.platform == "darwin":
        return "install one with: xcode-select --install"
    return "install one, such as g++ (Debian and Ubuntu: apt install g++), or name one in $CXX"


def compile_library(
    compiler: Compiler, include: Path, folder: Path, *, extra_flags: Sequence[str] = ()
) -> Path:
    """Make the library in `folder`, where intermediate files stay, too, and return its path.

    `include` has jaxlib's headers; `extra_flags` go to the compiler and the linker (sanitizers).
    Raises `NativeUnavailable` with the compiler's words if it fails.
    """
    sets = [one for one in instruction_sets() if _knows(compiler, one)]
    common = [*compiler.command, *FLAGS, *extra_flags, "-isystem", str(include)]
    has = [f"-DJAXPAGED_HAVE_{one.name.upper()}" for one in sets]
    jobs = [
        (source, folder / f"{source.stem}.o", [*common, *has])
        for source in sources()
        if source.name != KERNELS
    ]
    for one in sets:
        command = [*common, *one.flags, f"-DJAXPAGED_ISA={one.name}"]
        jobs.append((HERE / KERNELS, folder / f"kernels-{one.name}.o", command))

    def compile_one(job: tuple[Path, Path, list[str]]) -> None:
        source, target, command = job
        _build([*command, "-c", str(source), "-o", str(target)], source.name)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        # The longest, which come last, are begun first.
        list(pool.map(compile_one, reversed(jobs)))
    library = folder / "library.so"
    # In this order, from the lowest instruction set up: of a function of the C++ library that
    # several objects have, the linker keeps the first, which runs on all their processors.
    objects = [str(target) for _, target, _ in jobs]
    link = [*compiler.command, "-shared", "-pthread", *extra_flags, *objects, "-o", str(library)]
    _build(link, "the library")
    return library


def _knows(compiler: Compiler, one: InstructionSet) -> bool:
    """Old compilers lack the newest instructions; processors that have them take the next lower."""
    probe = [*compiler.command, *one.flags, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        _run(probe, _VERSION_SECONDS)
    except subprocess.CalledProcessError:
        return False
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler.command[0]} does not run ({_reason(error)})") from error
    return True


def _build(command: list[str], what: str) -> None:
    try:
        _run(command, COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(
            f"{command[0]} could not make {what} of the native kernels: {_reason(error)}"
        ) from error


def _run(command: list[str], seconds: float) -> str:
    return subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    ).stdout


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in str(error.stderr).splitlines() if line.strip()]
        wrong = [line for line in lines if "error" in line.lower()] or lines
        return " / ".join(wrong[:_TOLD_LINES]) or f"exit status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {error.timeout:.0f} s"
    return getattr(error, "strerror", None) or str(error)
