"""Exceptions that users meet. Each names the argument, its value, the limit and the way out."""

from __future__ import annotations


class JaxpagedError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(JaxpagedError, ValueError):
    """An engine setting is unknown, out of range, or contradicts another."""


class InvalidRequestError(JaxpagedError, ValueError):
    """One request is malformed; nothing was scheduled and the engine goes on.

    `param` is the name of the offending argument, for the HTTP layer. `index` is the place of the
    offending prompt in a batch, where there is one.
    """

    def __init__(self, message: str, param: str | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.index = index


class UnavailableError(JaxpagedError, RuntimeError):
    """The engine takes no request now: it is loading, shutting down, or its queue is full.

    Nothing was queued. `retry_after` is the number of seconds after which to try again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelLoadError(JaxpagedError, ValueError):
    """A checkpoint, tokenizer or model configuration cannot be used as it is."""


class UnsupportedModelError(ModelLoadError):
    """The architecture, or a setting that changes its mathematics, is not implemented."""


def told(error: BaseException | None) -> str:
    """Kind and text of an error in one line; "" for None."""
    return "" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")


class EngineDeadError(JaxpagedError, RuntimeError):
    """The engine was closed, or failed in a way it could not recover from."""
