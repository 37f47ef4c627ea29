"""The thread that runs an engine and everything that touches it.

The event loop posts commands, which the thread takes between two steps, and is told the outputs of
each step in one call. An idle engine waits for the next command; nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpaged.config import EngineConfig
from jaxpaged.errors import EngineDeadError, told
from jaxpaged.metrics import EngineMetrics
from jaxpaged.outputs import RequestOutput

if TYPE_CHECKING:  # importing it starts JAX, which only the engine's thread does
    from jaxpaged.engine import Engine

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
Build = Callable[[EngineConfig, Progress], "Engine"]
_log = logging.getLogger(__name__)


class EngineThread:
    """Builds an engine, serves it, and closes it, all on its own thread.

    What happens is told on the event loop that made this: `on_loaded` once, `on_outputs` after each
    step that had some, `on_death` when loading or the engine failed, with nothing to follow.
    """

    def __init__(
        self,
        config: EngineConfig,
        build: Build | None,
        metrics: EngineMetrics,
        *,
        on_loaded: Callable[[], None],
        on_outputs: Callable[[list[RequestOutput]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`build` makes the engine (default: `startup.build_engine`). Needs a running loop."""
        self.engine: Engine | None = None
        """Once loaded. Other threads may read what is documented so, and call nothing else."""
        self.progress: tuple[int, int] | None = None
        """Programs compiled and their number, while loading."""
        self.step_began: float | None = None
        """Seconds of `time.monotonic()`; None between steps."""
        self._stopping = False
        self._config = config
        self._build = build or _build_engine
        self._metrics = metrics
        self._on_loaded, self._on_outputs, self._on_death = on_loaded, on_outputs, on_death
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    def post(self, function: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Have a command run between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(retrieved)
        self._commands.put(_Command(function, future))
        return future

    async def stop(self, seconds: float) -> None:
        """End after the step that runs (while loading: after the program that is compiled), and
        wait for that as long.
        """
        self._stopping = True
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, seconds)

    def refuse_all(self, error: Exception) -> None:
        """Commands that nobody will run any more end with this error."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None and not command.future.done():
                command.future.set_exception(error)

    def _run(self) -> None:
        try:
            engine = self._build(self._config, self._note_progress)
            engine.metrics = self._metrics
            self.engine = engine
        except BaseException as error:
            self._tell(self._on_death, error)
            return
        self._tell(self._on_loaded)
        try:
            self._serve(engine)
        except BaseException as error:
            _log.critical("The engine's thread has died.", exc_info=error)
            self._tell(self._on_death, error)
        finally:
            self.step_began = None
            with suppress(Exception):  # the first error is the one to tell
                engine.close()

    def _serve(self, engine: Engine) -> None:
        while self._take_commands(engine):
            if not engine.has_unfinished_requests():
                continue
            self.step_began = time.monotonic()
            outputs = engine.step()
            self.step_began = None
            if outputs:
                self._tell(self._on_outputs, outputs)

    def _take_commands(self, engine: Engine) -> bool:
        """Run what has been posted; waits for something only while there is nothing to compute.

        False when it is time to stop.
        """
        wait = not engine.has_unfinished_requests()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._answer(command, engine)
            wait = False

    def _answer(self, command: _Command, engine: Engine) -> None:
        try:
            result = command.function(engine)
        except Exception as error:
            self._tell(_set_exception, command.future, error)
        except BaseException as error:
            self._tell(_set_exception, command.future, as_exception(error))
            raise
        else:
            self._tell(_set_result, command.future, result)

    def _note_progress(self, done: int, total: int, program: str) -> None:
        self.progress = (done, total)
        if self._stopping:
            raise EngineDeadError("The engine was closed while it was loading.")

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run something on the event loop; nobody is left to hear it once that is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


@dataclass(frozen=True, slots=True)
class _Command:
    function: Callable[[Engine], Any]
    future: asyncio.Future[Any]


def _build_engine(config: EngineConfig, progress: Progress) -> Engine:
    from jaxpaged.startup import build_engine  # starts JAX

    return build_engine(config, progress)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def retrieved(future: asyncio.Future[Any]) -> None:
    """The error of a future that nobody awaits any more is no news."""
    if not future.cancelled():
        future.exception()


def as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else EngineDeadError(told(error))
