"""Puts a compiled library of the native CPU kernels into wheels, where that is possible.

It takes a C++ compiler and jaxlib's headers, which are here only if the build is not isolated
(`pip install --no-build-isolation .` into an environment that has jaxlib and setuptools). Otherwise
the wheel has the sources alone, and the library is compiled at first use.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pallas_kernels.native.toolchain import NativeUnavailable, find_compiler


def obstacle() -> str | None:
    """Why no library can be compiled here."""
    if importlib.util.find_spec("jax") is None:
        return "this build is isolated from jax, which has the headers"
    try:
        find_compiler()
    except NativeUnavailable as error:
        return str(error)
    return None


OBSTACLE = obstacle()


class Project(Distribution):
    def has_ext_modules(self) -> bool:
        return OBSTACLE is None


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        why = OBSTACLE
        if why is None:
            from pallas_kernels.native import build

            try:
                build.compile_into(
                    Path(self.build_lib, "pallas_kernels", "native", build.SHIPPED.name)
                )
            except NativeUnavailable as error:
                why = str(error)
        if why is not None:
            sys.stderr.write(
                f"The native CPU kernels will be compiled at first use, not now: {why}.\n"
            )


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The library does not depend on the version of Python."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if OBSTACLE else ("py3", "none", platform)


setup(
    distclass=Project,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel},
)
