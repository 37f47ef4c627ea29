"""Which wheels are still needed to compile the GPU kernels without a GPU, one a line.

    python scripts/aot_wheels.py

Run by `sh scripts/test.sh`, which installs them with --no-deps: XLA's CUDA plugin of exactly the
installed jax's version, without the CUDA libraries it would only need to run something, and ptxas
with its library of functions where no ptxas 13 is found. Prints nothing if nothing is needed.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kernels.aot import toolchain


def main() -> None:
    wanted = metadata.version("jax")
    wheels = [
        f"{package}=={wanted}"
        for package in toolchain.PLUGIN_PACKAGES
        if toolchain.installed_version(package) != wanted
    ]
    if toolchain.ptxas() is None:
        wheels += toolchain.PTXAS_WHEELS
    for wheel in wheels:
        print(wheel)


if __name__ == "__main__":
    main()
