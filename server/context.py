"""What all handlers share: the engine, the settings, and the names the model goes by."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import Request

from jaxpaged import __version__
from jaxpaged.async_engine import AsyncEngine
from server.errors import ApiError

if TYPE_CHECKING:
    from server.metrics import HttpMetrics
    from server.settings import ServerConfig


@dataclass
class Context:
    """One server."""

    engine: AsyncEngine
    settings: ServerConfig
    http: HttpMetrics
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start."""
    in_flight: int = 0
    """Requests being answered."""

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """The first one is told where the client names none."""
        return self.settings.served_model_name or (self.engine.config.model,)

    def model_named(self, name: str | None) -> str:
        """The name to answer with. Raises `ApiError` 404 for a model that is not served."""
        if name is None or name == "":
            return self.served_names[0]
        if name not in self.served_names:
            shown = name if len(name) <= 200 else f"{name[:200]}..."
            raise ApiError(
                404,
                f"The model `{shown}` does not exist. Valid aliases: "
                f"{', '.join(self.served_names)}.",
                param="model",
            )
        return name

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: changes with the version, the devices and the model."""
        info = self.engine.info
        told = f"{info.model} {info.dtype} {info.max_model_len} {info.block_size}"
        digest = hashlib.sha256(told.encode()).hexdigest()[:8]
        return f"jaxpaged-{__version__}-tp{info.tensor_parallel_size}-{digest}"


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
