"""How the native kernels' library is compiled, kept, found and refused: with tiny sources in the
place of the true ones, and compilers that fail in the ways of true ones.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.config import cache_root, cxx
from jaxpaged.device.attention import AttentionSizes
from jaxpaged.device.attention_choice import choose_backend
from jaxpaged.errors import ConfigError
from pallas_kernels.native import build, cache, toolchain
from pallas_kernels.native.build import NativeUnavailable
from tests.device.model_shapes import TINY

SYSTEM_COMPILER = next(filter(None, map(shutil.which, toolchain.COMPILERS)), None)
pytestmark = pytest.mark.skipif(SYSTEM_COMPILER is None, reason="there is no C++ compiler")
X86 = platform.machine() == "x86_64"

# `level` is compiled for every instruction set, and one copy of it stays.
HEADER = """
__attribute__((noinline)) inline const char* level() {
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "all of them";
#endif
}
"""
KERNELS = """
#include "level.h"
namespace JAXPAGED_ISA { const char* ask() { return level(); } }
"""
DISPATCH = """
#include "level.h"
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char* jaxpaged_native_isa() { return level(); }
#ifdef JAXPAGED_HAVE_V4
EXPORTED int has_v4 = 1;
#endif
#ifdef JAXPAGED_HAVE_V4_BF16
EXPORTED int has_v4_bf16 = 1;
#endif
"""


class Said(list[str]):
    """What `load` announces."""

    @property
    def compiled(self) -> bool:
        return any("Compiling" in line for line in self)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tiny sources, in a process that has loaded no library yet."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in (("level.h", HEADER), ("kernels.cc", KERNELS), ("dispatch.cc", DISPATCH)):
        (folder / name).write_text(text)
    monkeypatch.setattr(toolchain, "HERE", folder)
    monkeypatch.setattr(build, "SHIPPED", folder / "prebuilt")
    monkeypatch.setattr(build, "HANDLERS", ())
    monkeypatch.setattr(build, "_library", None)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "native"


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process."""
    monkeypatch.setattr(build, "_library", None)


def compiler(path: Path, script: str) -> str:
    """A compiler that does what the shell script says; the true one is "$CC"."""
    path.write_text(f'#!/bin/sh\nCC="{SYSTEM_COMPILER}"\n{script}\n')
    path.chmod(0o755)
    return str(path)


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def refused(folder: Path, compiler: str | None = None) -> str:
    with pytest.raises(NativeUnavailable) as error:
        build.load(folder=folder, compiler=compiler)
    return str(error.value)


# ------------------------------------------------------------------ compiled once


@pytest.mark.usefixtures("sources")
def test_it_is_compiled_once_and_then_found(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load(folder=folder, announce=said.append)
    assert said.compiled
    (library,) = libraries(folder)
    assert [path.name for path in folder.iterdir() if path != library] == ["lock"]
    assert folder.stat().st_mode & 0o777 == library.stat().st_mode & 0o777 == 0o700
    said.clear()
    build.load(folder=Path("/nowhere"), announce=said.append)  # loaded already
    again(monkeypatch)
    build.load(folder=folder, announce=said.append)
    assert said == []
    assert build.isa() == "all of them"


@pytest.mark.skipif(not X86, reason="one instruction set")
@pytest.mark.usefixtures("sources")
def test_a_shared_function_is_the_one_that_runs_on_all_processors(folder: Path) -> None:
    """Every object brings its own `level`. The dispatcher calls the one that the linker kept."""
    build.load(folder=folder)
    assert build.isa() == "all of them"


@pytest.mark.skipif(not X86, reason="one instruction set")
@pytest.mark.usefixtures("sources")
def test_an_old_compiler_leaves_out_what_it_does_not_know(tmp_path: Path, folder: Path) -> None:
    old = compiler(
        tmp_path / "old",
        'case "$*" in *avx512bf16*) echo "error: unrecognized option" >&2; exit 1;; esac\n'
        'exec "$CC" "$@"',
    )
    build.load(folder=folder, compiler=old)
    assert hasattr(build._library, "has_v4") and not hasattr(build._library, "has_v4_bf16")


def test_what_goes_into_a_library_is_in_its_name(
    sources: Path, tmp_path: Path, folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = tmp_path / "headers"
    shutil.copytree(jax.ffi.include_dir(), headers)
    monkeypatch.setattr(build, "_include", lambda: headers)
    newer = compiler(tmp_path / "newer", '[ "$1" != --version ] || { echo 99; exit; }; "$CC" "$@"')
    build.load(folder=folder)

    def compiles_again(command: str | None = None) -> bool:
        again(monkeypatch)
        said.clear()
        build.load(folder=folder, compiler=command, announce=said.append)
        return said.compiled

    assert not compiles_again()
    assert compiles_again(newer)
    (sources / "kernels.cc").write_text(KERNELS + "\n")
    assert compiles_again()
    (headers / "xla" / "ffi" / "api" / "c_api.h").write_text("// the next version\n")
    assert compiles_again()
    assert not compiles_again()
    assert len({path.name.rpartition("-")[0] for path in libraries(folder)}) == 4


def test_one_that_came_with_the_package_goes_first(
    sources: Path, folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = build.compile_into(sources / "prebuilt")
    build.load(folder=folder, compiler="/nonexistent/c++", announce=said.append)
    assert said == [] and not folder.exists()
    # Made for a C library that this system does not have, it is as good as none.
    again(monkeypatch)
    shipped.unlink()
    spoil(sources / "prebuilt", shipped.name)
    build.load(folder=folder, announce=said.append)
    assert said.compiled and len(libraries(folder)) == 1


def spoil(folder: Path, name: str) -> Path:
    """A whole file of that name (but for the digest) which is no library."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / "draft"
    draft.write_bytes(b"\x7fELF, but of another world")
    return cache.keep(draft, folder, name.rpartition("-")[0])


@pytest.mark.usefixtures("sources")
def test_flags_of_ones_own(folder: Path) -> None:
    plain = build.compile_into(folder / "plain").stat().st_size
    with_symbols = build.compile_into(folder / "debug", extra_flags=["-g"]).stat().st_size
    assert with_symbols > plain


# ------------------------------------------------------------------ no way


@pytest.mark.usefixtures("sources")
def test_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(folder, "/nonexistent/c++ -m64")
    assert "$CXX" in text and "'/nonexistent/c++'" in text
    monkeypatch.setenv("PATH", "")
    text = refused(folder)
    assert "no C++ compiler was found" in text and "$CXX" in text
    assert not folder.exists()


@pytest.mark.usefixtures("sources")
def test_without_a_compiler_what_is_there_already_will_do(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load(folder=folder)
    again(monkeypatch)
    monkeypatch.setenv("PATH", "")
    build.load(folder=folder, announce=said.append)
    assert said == [] and build.isa()


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("echo 'cannot run' >&2; exit 3", ["does not run", "cannot run"]),
        (
            '[ "$1" != --version ] || exec "$CC" "$@"\n'
            'case "$*" in *-fsyntax-only*) exit 0;; esac\n'
            "echo 'a.cc:1: note: x' >&2; echo 'fatal error: No space left on device' >&2; exit 1",
            ["could not make", "fatal error: No space left on device"],
        ),
        (
            'case "$*" in *-shared*) echo "ld: no such thing" >&2; exit 1;; esac; exec "$CC" "$@"',
            ["could not make the library", "ld: no such thing"],
        ),
        (
            'case "$*" in *-shared*) kill -9 $$;; esac; exec "$CC" "$@"',
            ["could not make the library", "exit status -9"],
        ),
    ],
    ids=["does not run", "disk full", "no linker", "killed"],
)
def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, folder: Path, script: str, parts: list[str]
) -> None:
    text = refused(folder, compiler(tmp_path / "broken", script))
    assert all(part in text for part in parts), text
    assert libraries(folder) == []
    assert not folder.exists() or [path.name for path in folder.iterdir()] == ["lock"]


def test_sources_that_change_meanwhile(sources: Path, tmp_path: Path, folder: Path) -> None:
    """Objects of different versions do not fit each other."""
    editing = compiler(
        tmp_path / "editing",
        f'case "$*" in *-shared*) echo >>{sources}/level.h;; esac; exec "$CC" "$@"',
    )
    assert "changed while they were compiled" in refused(folder, editing)
    assert libraries(folder) == []


@pytest.mark.usefixtures("sources")
def test_a_compiler_that_hangs(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "COMPILE_SECONDS", 0.2)
    slow = compiler(tmp_path / "slow", 'case "$*" in *-shared*) exec sleep 60;; esac; "$CC" "$@"')
    assert "it took more than" in refused(folder, slow)


@pytest.mark.usefixtures("sources")
def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    text = refused(tmp_path / "file" / "native")
    assert "cannot be used (" in text and "JAXPAGED_CACHE_DIR" in text
    (tmp_path / "ours").mkdir(mode=0o700)

    def read_only(*_: object, **__: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "mkdtemp", read_only)
    assert "cannot be used (Read-only file system)" in refused(tmp_path / "ours")


@pytest.mark.usefixtures("sources")
def test_others_cannot_put_a_library_in(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load(folder=folder)
    for place, mode, told in (
        (folder, 0o777, "others may write"),
        (folder, 0o770, "others may write"),
        (folder.parent, 0o777, f"others may write to {folder.parent}"),
    ):
        again(monkeypatch)
        before = place.stat().st_mode
        place.chmod(mode)
        text = refused(folder)
        assert told in text and "JAXPAGED_CACHE_DIR" in text
        place.chmod(before)
    folder.parent.chmod(0o1777)  # as /tmp: others cannot rename what is ours
    build.load(folder=folder, announce=said.append)
    assert said == []


@pytest.mark.usefixtures("sources")
def test_a_folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load(folder=folder)
    again(monkeypatch)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:  # only root can give a folder away
        monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    assert "belongs to another user" in refused(folder)


# ------------------------------------------------------------------ damage and company


@pytest.mark.usefixtures("sources")
def test_a_damaged_library_is_compiled_again(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load(folder=folder)
    (library,) = libraries(folder)
    whole = library.read_bytes()
    for damaged in (b"", whole[:-100], whole[:-100] + bytes(100)):
        library.unlink()  # this process still runs from the one that was there
        library.write_bytes(damaged)
        again(monkeypatch)
        said.clear()
        build.load(folder=folder, announce=said.append)
        assert said.compiled and build.isa()
        assert libraries(folder) == [library] and library.read_bytes() == whole


@pytest.mark.usefixtures("sources")
def test_a_library_that_does_not_load_is_not_compiled_at_every_start(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder from which nothing may run."""
    build.load(folder=folder)
    (library,) = libraries(folder)
    library.unlink()
    spoilt = spoil(folder, library.name)
    again(monkeypatch)
    with pytest.raises(NativeUnavailable, match="cannot be loaded") as error:
        build.load(folder=folder, announce=said.append)
    assert str(spoilt) in str(error.value) and "JAXPAGED_CACHE_DIR" in str(error.value)
    assert said == []


@pytest.mark.usefixtures("sources")
def test_what_a_killed_process_left_behind_goes_away(folder: Path) -> None:
    old, new = folder / "building-old", folder / "building-new"
    for left in (old, new):
        left.mkdir(parents=True, mode=0o700)
        (left / "half.o").write_bytes(b"half")
    folder.chmod(0o700)
    os.utime(old, (time.time() - 5000,) * 2)
    build.load(folder=folder)
    assert not old.exists() and new.exists(), "the newer one may be at work"


def test_processes_that_start_together_compile_once(
    sources: Path, tmp_path: Path, folder: Path
) -> None:
    counting = compiler(
        tmp_path / "counting",
        f'case "$*" in *-shared*) echo linked >>{tmp_path}/log; sleep 0.5;; esac; exec "$CC" "$@"',
    )
    script = f"""
from pathlib import Path
from pallas_kernels.native import build, toolchain
here = toolchain.HERE = Path({str(sources)!r})
build.SHIPPED, build.HANDLERS = here / "prebuilt", ()
build.load(folder=Path({str(folder)!r}), compiler={counting!r})
assert build.isa() == "all of them"
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert (tmp_path / "log").read_text().split() == ["linked"]
    assert len(libraries(folder)) == 1


@pytest.mark.usefixtures("sources")
def test_a_lock_that_is_never_released_delays_and_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        entered = threading.Event()
        started = time.monotonic()
        with cache.locked(folder, 0.2):
            entered.set()
        assert entered.is_set() and time.monotonic() - started >= 0.2

        def no_locks(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(cache.fcntl, "flock", no_locks)
        with cache.locked(folder, 1000.0):
            pass


# ------------------------------------------------------------------ what an engine makes of it


def sizes() -> AttentionSizes:
    float32 = jnp.dtype(jnp.float32)
    return AttentionSizes.of(TINY, block_size=4, dtype=float32, cache_dtype=float32)


@pytest.mark.usefixtures("sources")
def test_an_engine_without_a_compiler_warns_once_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXPAGED_CACHE_DIR", str(tmp_path / "fresh"))
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert cxx() == "/nonexistent/c++" and cache_root() == tmp_path / "fresh"
    backend, why = choose_backend("auto", sizes(), jax.devices()[0])
    assert backend.name == "reference" and "native" in why
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    text = record.getMessage()
    for part in ("falls back", "times as long", "$CXX", "/nonexistent/c++"):
        assert part in text, text
    with pytest.raises(ConfigError, match="attention_backend='native'.*/nonexistent.*'reference'"):
        choose_backend("native", sizes(), jax.devices()[0])


# ------------------------------------------------------------------ the true library


@pytest.mark.skipif(not X86, reason="one instruction set")
@pytest.mark.parametrize("level", ["v2", "v3", "v4", "nonsense"])
def test_a_lower_instruction_set_can_be_forced_and_is_right(level: str) -> None:
    script = """
import jax.numpy as jnp
from jaxpaged.config import cache_root
from pallas_kernels.native import build, trial
build.load(folder=cache_root() / "native")
for name in ("float32", "bfloat16", "float16"):
    trial.check(jnp.dtype(name))
print(build.isa())
"""

    def isa(**environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    levels = [one.name for one in toolchain.X86_64]
    best = isa()
    found = isa(JAXPAGED_NATIVE_ISA=level)
    if level in levels:
        assert found == min(best, level, key=levels.index)
    else:
        assert found == best
