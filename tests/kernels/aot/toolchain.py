"""What compiling for a GPU needs where there is none, and why it cannot be done if it cannot.

Needed are XLA's CUDA plugin of exactly jax's version (no driver, no CUDA libraries) and ptxas 13.
`scripts/test.sh` installs both, in a folder of their own: jax would try the plugin in every process
that finds it, and complain where there is no cuDNN. Imports no jax.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TARGET = Path(__file__).with_name("h200.textproto")
ARCHITECTURE = "sm_90a"
WHEELS = Path(sys.prefix, "aot-wheels")
"""Where `scripts/test.sh` installs them. The usual folders are looked through too."""
PLUGIN_PACKAGES = ("jax-cuda13-pjrt", "jax-cuda13-plugin")
PTXAS_WHEELS = ("nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*")
_OLDEST_PTXAS = (13, 0)


@functools.cache
def missing() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    jax_version = metadata.version("jax")
    for package in PLUGIN_PACKAGES:
        version = installed_version(package)
        if version is None:
            return f"{package} is not installed; scripts/test.sh installs it where it can"
        if version != jax_version:
            return f"{package} is {version}, but jax is {jax_version}; both must be the same"
    if not ptxas_candidates():
        return (
            "there is no ptxas in PATH, /usr/local/cuda/bin or the package nvidia-cuda-nvcc; "
            "scripts/test.sh installs it where it can"
        )
    if ptxas() is None:
        found = ", ".join(f"{path} ({ptxas_version(path)})" for path in ptxas_candidates())
        return f"ptxas is older than {_OLDEST_PTXAS[0]}.{_OLDEST_PTXAS[1]}: {found}"
    return None


def installed_version(package: str) -> str | None:
    """The first one found is the one that workers import."""
    places = [str(WHEELS), *sys.path]
    found = next(iter(metadata.distributions(name=package, path=places)), None)
    return None if found is None else found.version


@functools.cache
def ptxas() -> Path | None:
    """The first ptxas that is new enough."""
    return next((p for p in ptxas_candidates() if _release(p) >= _OLDEST_PTXAS), None)


def ptxas_candidates() -> list[Path]:
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    folders += [str(path / "bin") for path in _wheel_folders()]
    found = (shutil.which("ptxas", path=folder) for folder in folders if folder)
    return [Path(path) for path in dict.fromkeys(found) if path]


def _wheel_folders() -> list[Path]:
    """Where the wheels nvidia-cuda-nvcc and nvidia-nvvm put their files."""
    roots = [WHEELS, *site.getsitepackages(), site.getusersitepackages()]
    folders = (Path(root, "nvidia", "cu13") for root in roots)
    return [folder for folder in folders if folder.is_dir()]


@functools.cache
def ptxas_version(path: Path) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+), V(\S+)", done.stdout)
    return match[2] if match else "unknown"


def _release(path: Path) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", ptxas_version(path))
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def worker_environment(dump: Path) -> dict[str, str]:
    """For a process that compiles; XLA writes assembly and schedules to `dump`."""
    compiler = ptxas()
    assert compiler is not None
    flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    if compiler.parent.parent in _wheel_folders():  # then libdevice is there too
        flags += f" --xla_gpu_cuda_data_dir={compiler.parent.parent}"
    environment = dict(os.environ)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    return environment | {
        "JAX_PLATFORMS": "cpu",
        # Without it the plugin complains that there is no cuDNN.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # a cached program would be dumped nowhere
        "XLA_FLAGS": flags,
        "PATH": f"{compiler.parent}{os.pathsep}{environment.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(WHEELS), *sys.path]),
    }
