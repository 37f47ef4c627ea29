"""One way to read a checkpoint's tensors, whatever its format."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.source import ModelSource

Array = npt.NDArray[np.generic]


class TensorReader(Protocol):
    """Tensors by their Hugging Face names. Opening checks the files; reading only maps pages."""

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype_name(self, name: str) -> str:
        """How it is stored: float32, float16, bfloat16, ..., or a GGML type such as Q4_1."""
        ...

    def read(self, name: str) -> Array:
        """The whole tensor, mapped where the file allows it; quantised ones become float32."""
        ...

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Array:
        """`read(name)[index]`, touching only what is needed. Slices have step 1."""
        ...

    def close(self) -> None:
        """Forget the mappings. Arrays handed out before stay valid."""
        ...


def some(names: list[str], limit: int = 5) -> str:
    """The first few names, for a message."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def open_reader(source: ModelSource) -> TensorReader:
    """The reader for a resolved source. Raises `ModelLoadError` for damaged or missing files."""
    # Imported here: each format brings its own libraries.
    if source.kind == "gguf":
        from jaxpaged.weights.gguf_reader import GGUFTensorReader

        assert source.gguf is not None
        return GGUFTensorReader(source.gguf)
    if source.kind == "hf":
        from jaxpaged.weights.safetensors_reader import SafetensorsReader

        return SafetensorsReader(source.path)
    if source.kind == "orbax":
        from jaxpaged.weights.orbax_reader import OrbaxReader

        assert source.checkpoint is not None
        return OrbaxReader(source.checkpoint)
    raise ModelLoadError(
        f"{source.name!r} was opened with dummy weights; it has no tensors to read."
    )
