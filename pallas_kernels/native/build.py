"""Makes the native kernels ready in this process: finds their library or compiles it, loads it, and
tells XLA of them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from pallas_kernels.native import cache, toolchain
from pallas_kernels.native.toolchain import NativeUnavailable

__all__ = ["HANDLERS", "NativeUnavailable", "compile_into", "isa", "load", "multiplies"]

HANDLERS = (
    *("jaxpaged_paged_attention", "jaxpaged_attend", "jaxpaged_write_kv"),
    *("jaxpaged_matrix_product", "jaxpaged_rms_norm", "jaxpaged_rotate"),
)
"""Functions of the library that XLA calls, and the names of its targets."""
SHIPPED = toolchain.HERE / "prebuilt"
"""Where the package's own build puts a library."""
ABOUT_SECONDS = 10
"""What a compilation takes on two cores (20 s of processor time)."""
Announce = Callable[[str], None]

_guard = threading.Lock()
_library: ctypes.CDLL | None = None


def default_folder() -> Path:
    return Path.home() / ".cache" / "jaxpaged" / "native"


def load(
    *, folder: Path | None = None, compiler: str | None = None, announce: Announce | None = None
) -> None:
    """Find or build the library, load it, and register its handlers with XLA, once a process.

    In this order: one that came with the package; one in `folder` (None: `default_folder()`); one
    that is compiled now with `compiler` (None: the system's) and kept there. `announce` gets a
    line if that has to be done, because it takes a while. Raises `NativeUnavailable` if there is
    no way.
    """
    global _library
    with _guard:
        if _library is None:
            library = _opened(folder, compiler, announce or _silent)
            if _isa_of(library) == "none":
                raise NativeUnavailable(
                    "this processor lacks the instructions of 2009 that the kernels need at least"
                )
            _library = library


def isa() -> str:
    """The instruction set that the kernels use on this processor. Call `load` first."""
    assert _library is not None
    return _isa_of(_library)


def _isa_of(library: ctypes.CDLL) -> str:
    tell = library.jaxpaged_native_isa
    tell.restype = ctypes.c_char_p
    return bytes(tell()).decode()


def multiplies() -> bool:
    """Whether the library has matrix products that this processor does better than XLA's. Call
    `load` first.
    """
    assert _library is not None
    return bool(_library.jaxpaged_multiplies())


def compile_into(
    folder: Path, *, compiler: str | None = None, extra_flags: Sequence[str] = ()
) -> Path:
    """Compile the library and put it into `folder`, under the name by which `load` knows it.

    `extra_flags` are for the compiler and the linker. Raises `NativeUnavailable` if it fails.
    """
    chosen = toolchain.find_compiler(compiler)
    cache.prepare(folder)
    return _compiled(folder, chosen, extra_flags)


def _silent(_: str) -> None: ...


def _include() -> Path:
    return Path(jax.ffi.include_dir())


def _compiled(folder: Path, compiler: toolchain.Compiler, extra_flags: Sequence[str] = ()) -> Path:
    include = _include()
    key = toolchain.source_key(include)
    stem = f"{key}-{compiler.key}"
    with cache.scratch(folder) as scratch:
        built = toolchain.compile_library(compiler, include, scratch, extra_flags=extra_flags)
        if toolchain.source_key(include) != key:  # an update, or somebody who edits
            raise NativeUnavailable("the sources changed while they were compiled; start again")
        try:
            return cache.keep(built, folder, stem)
        except OSError as error:
            raise cache.unusable(folder, error) from error


# ------------------------------------------------------------------ finding and loading


def _opened(folder: Path | None, compiler: str | None, announce: Announce) -> ctypes.CDLL:
    key = toolchain.source_key(_include())
    shipped = cache.find(SHIPPED, key)
    if shipped is not None:
        try:
            return _open(shipped)
        except NativeUnavailable:
            pass  # made for another system: its C library may be newer than this one's
    return _open(_cached(folder or default_folder(), key, compiler, announce))


def _cached(folder: Path, key: str, compiler: str | None, announce: Announce) -> Path:
    """The library in `folder`, which is compiled if it is not there yet."""
    try:
        chosen = toolchain.find_compiler(compiler)
    except NativeUnavailable:
        found = _found(folder, key)  # by whatever compiler it was made
        if found is None:
            raise
        return found
    stem = f"{key}-{chosen.key}"
    found = _found(folder, stem)
    if found is not None:
        return found
    cache.prepare(folder)
    cache.check_owner(folder)
    announce(f"Compiling the native CPU kernels (once, about {ABOUT_SECONDS} s).")
    started = time.monotonic()
    with cache.locked(folder):
        found = _found(folder, stem)  # another process may have been quicker
        if found is None:
            found = _compiled(folder, chosen)
    announce(f"The native CPU kernels took {time.monotonic() - started:.1f} s.")
    return found


def _found(folder: Path, stem: str) -> Path | None:
    found = cache.find(folder, stem)
    if found is not None:
        cache.check_owner(folder)
    return found


def _open(path: Path) -> ctypes.CDLL:
    """Raises `NativeUnavailable` if the library cannot be loaded, or jaxlib does not take it."""
    try:
        library = ctypes.CDLL(str(path))
        for name in HANDLERS:
            jax.ffi.register_ffi_target(
                name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu"
            )
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled kernels cannot be loaded ({error}); remove {path} to have them compiled "
            "again, or set JAXPAGED_CACHE_DIR to a folder from which programs may run"
        ) from error
    except Exception as error:  # what a jaxlib raises has changed between its versions
        raise NativeUnavailable(
            f"this jaxlib does not take the compiled kernels of {path} ({error})"
        ) from error
    return library
