"""jaxpaged: the paged LLM inference engine for JAX.

`from jaxpaged import LLM, SamplingParams, EngineConfig`. Names are imported when first used, so
that importing the package (or reading the command line's help) does not start JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.async_engine import AsyncEngine as AsyncEngine
    from jaxpaged.beam_params import BeamSearchParams as BeamSearchParams
    from jaxpaged.config import EngineConfig as EngineConfig
    from jaxpaged.engine import Engine as Engine
    from jaxpaged.errors import (
        ConfigError as ConfigError,
    )
    from jaxpaged.errors import (
        EngineDeadError as EngineDeadError,
    )
    from jaxpaged.errors import (
        InvalidRequestError as InvalidRequestError,
    )
    from jaxpaged.errors import (
        ModelLoadError as ModelLoadError,
    )
    from jaxpaged.errors import (
        UnavailableError as UnavailableError,
    )
    from jaxpaged.errors import (
        UnsupportedModelError as UnsupportedModelError,
    )
    from jaxpaged.llm import LLM as LLM
    from jaxpaged.outputs import CompletionOutput as CompletionOutput
    from jaxpaged.outputs import EngineStats as EngineStats
    from jaxpaged.outputs import Logprob as Logprob
    from jaxpaged.outputs import RequestOutput as RequestOutput
    from jaxpaged.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineConfig": "config",
    "SamplingParams": "sampling_params",
    "BeamSearchParams": "beam_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "EngineStats": "outputs",
    "ConfigError": "errors",
    "InvalidRequestError": "errors",
    "ModelLoadError": "errors",
    "UnsupportedModelError": "errors",
    "EngineDeadError": "errors",
    "UnavailableError": "errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
