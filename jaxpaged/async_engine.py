"""An engine in a thread of its own, for asyncio: requests go in, a stream of deltas comes out.

`AsyncEngine` is the event loop's side: it tokenises in a pool of threads, posts to the engine's
thread (`engine_thread.py`), and hands the outputs of each step to the streams they belong to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine_thread import Build, EngineThread, as_exception, retrieved
from jaxpaged.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    UnavailableError,
    told,
)
from jaxpaged.metrics import EngineMetrics
from jaxpaged.outputs import EngineStats, RequestOutput
from jaxpaged.request_stream import RequestStream
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:  # importing these starts JAX, which only the engine's thread does
    from jaxpaged.engine import Engine
    from jaxpaged.intake import Prompt
    from jaxpaged.text.tokenizer import Tokenizer

T = TypeVar("T")

_TEXT_THREADS = 4
"""Tokenising and templates run here, off the event loop."""
_LOADING_RETRY = 5.0
_BUSY_RETRY = 1.0
_CLOSE_SECONDS = 60.0
"""How long `close` waits for the step that is running."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is. Lengths in tokens."""

    model: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    num_blocks: int
    """The null block included."""
    block_size: int
    dtype: str
    cache_dtype: str
    attention_backend: str
    """The one that runs, where the setting may be auto."""
    deterministic: bool
    """What a request gets does not depend on what runs beside it."""
    tensor_parallel_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    enable_prefix_caching: bool


class AsyncEngine:
    """Runs one `Engine` in a thread. All methods belong to the thread of the event loop that called
    `start`, except where they say otherwise.

    Raises `ConfigError` for settings that the thread cannot honour.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        build: Build | None = None,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
    ) -> None:
        """`build` makes the engine (default: `startup.build_engine`). The limits are on requests
        that wait for admission, and on their prompt tokens; None is no limit.
        """
        if config.num_processes > 1:
            raise ConfigError(
                f"num_processes={config.num_processes}: requests that come over a network reach "
                "only one process. Use one, with --tensor-parallel-size for its devices."
            )
        self.config = config
        self.metrics = EngineMetrics()
        self.status = "loading"
        """loading, ready, draining, dead or closed."""
        self.error: BaseException | None = None
        """Why the engine is dead, or could not be loaded."""
        self._build = build
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._thread: EngineThread | None = None
        self._streams: dict[str, RequestStream] = {}
        """Every accepted request whose last output has not come, its stream closed or not."""
        self._submitting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._info: EngineInfo | None = None
        self._pool = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="jaxpaged-text")

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the engine's thread: it loads the model, compiles, then serves."""
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(retrieved)
        self._thread = EngineThread(
            self.config,
            self._build,
            self.metrics,
            on_loaded=self._on_loaded,
            on_outputs=self._deliver,
            on_death=self._on_death,
        )

    async def wait_ready(self) -> None:
        """Until the model is loaded; raises what loading raised."""
        await asyncio.shield(self._loaded)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the others, at most `timeout` seconds.

        False if some had to be aborted; their streams end with finish_reason "abort".
        """
        if self.status in ("loading", "ready"):
            self.status = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
            return True
        except TimeoutError:
            pass
        for request_id in list(self._streams):
            self._abort(request_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _CLOSE_SECONDS)
        return False

    async def close(self) -> None:
        """Abort everything, stop the thread and give the device memory back. Idempotent.

        Returns after a minute at most: a step or a load that hangs cannot be interrupted.
        """
        if self.status == "closed":
            return
        if self.status != "dead":
            self.status = "closed"
        if self._thread is not None:
            await self._thread.stop(_CLOSE_SECONDS)
        self._fail_all(EngineDeadError("The engine was closed."))
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ what it is

    @property
    def info(self) -> EngineInfo:
        """Raises `UnavailableError` while loading."""
        engine = self._loaded_engine()
        if self._info is None:
            self._info = _info(engine, self.config)
        return self._info

    @property
    def default_params(self) -> SamplingParams:
        """`SamplingParams()` with the sampling defaults that come with the model."""
        return self._loaded_engine().default_params

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._loaded_engine().intake.tokenizer

    @property
    def progress(self) -> tuple[int, int] | None:
        """Programs compiled and their number, while loading; None before the first."""
        return None if self._thread is None else self._thread.progress

    @property
    def num_unfinished(self) -> int:
        """Requests accepted, or on their way, that have not ended."""
        return len(self._streams) + self._submitting

    @property
    def seconds_in_step(self) -> float:
        """How long the step that is running has taken so far; 0 between steps. From any thread."""
        began = None if self._thread is None else self._thread.step_began
        return 0.0 if began is None else time.monotonic() - began

    def stats(self) -> EngineStats:
        """Counters and gauges, without waiting for the engine. From any thread."""
        engine = self._engine
        return EngineStats() if engine is None else engine.stats()

    def blocks_by_state(self) -> dict[str, int]:
        """KV blocks that are free, cached, held, shared and null; empty while loading.

        Does not wait for the engine. From any thread; costs a walk over all blocks.
        """
        engine = self._engine
        return {} if engine is None else engine.scheduler.kv.pool.count_by_state()

    def memory_bytes(self) -> dict[str, int]:
        """What lies on the first device, by kind (`Runner.memory_bytes`); empty while loading.

        Does not wait for the engine. From any thread.
        """
        engine = self._engine
        return {} if engine is None else engine.runner.memory_bytes()

    @property
    def _engine(self) -> Engine | None:
        return None if self._thread is None else self._thread.engine

    def _loaded_engine(self) -> Engine:
        """Raises `UnavailableError` or `EngineDeadError` while there is none."""
        engine = self._engine
        if engine is not None:
            return engine
        if self.status == "dead":
            raise EngineDeadError(f"The engine could not be started: {told(self.error)}")
        done = ""
        if self.progress is not None:
            done = f" ({self.progress[0]}/{self.progress[1]} programs compiled)"
        raise UnavailableError(
            f"The model is still loading{done}; try again in {_LOADING_RETRY:g} s.", _LOADING_RETRY
        )

    # ------------------------------------------------------------------ requests

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        stream_interval: int = 1,
    ) -> RequestStream:
        """Queue a request; returns once the engine has accepted it.

        The prompt is tokenised in a pool of threads. `stream_interval` is the number of tokens
        between two deltas; a beam search has one delta, at its end. Raises `InvalidRequestError`,
        `UnavailableError` (loading, shutting down, queue full) or `EngineDeadError`; nothing is
        queued then, nor when it is cancelled.
        """
        arrival = time.monotonic()
        self._check_accepting()
        self._submitting += 1
        self._idle.clear()
        try:
            intake = self._loaded_engine().intake
            parsed = await self.run_in_pool(intake.parse, prompt, cache_salt)
            self._check_accepting()
            if request_id in self._streams:
                raise InvalidRequestError(
                    f"request_id {request_id!r} is in use; wait for it to end or take another.",
                    param="request_id",
                )
            stream = self._streams[request_id] = RequestStream(request_id, parsed, self._abort)

            def add(engine: Engine) -> None:
                self._check_queue(engine, len(parsed.token_ids))
                engine.add_request(
                    request_id,
                    parsed,
                    params,
                    priority=priority,
                    arrival_time=arrival,
                    delta_interval=stream_interval,
                )

            accepted = self._post(add)
            try:
                await asyncio.shield(accepted)
            except asyncio.CancelledError:  # the caller left while the engine was busy
                accepted.add_done_callback(
                    lambda done: self._forget(request_id) if _failed(done) else stream.close()
                )
                raise
            except BaseException:
                self._forget(request_id)
                raise
            return stream
        finally:
            self._submitting -= 1
            self._note_idle()

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises `InvalidRequestError` without tokenizer, or for bad Unicode."""
        tokenizer = self._needed_tokenizer()

        def encode() -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self.run_in_pool(encode)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[str, list[int]]:
        """Text and ids of a conversation; options as `Tokenizer.render_chat`."""
        tokenizer = self._needed_tokenizer()

        def render() -> tuple[str, list[int]]:
            return tokenizer.render_chat(messages, **options)

        return await self.run_in_pool(render)

    async def run_in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run something that takes long, such as tokenising, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread, between two steps; returns what it returns."""
        self._loaded_engine()
        return await asyncio.shield(self._post(function))

    def _needed_tokenizer(self) -> Tokenizer:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "This engine has no tokenizer (skip_tokenizer_init); give token ids."
            )
        return tokenizer

    def _check_accepting(self) -> None:
        if self.status == "draining" or self.status == "closed":
            raise UnavailableError("The server is shutting down.", _LOADING_RETRY)
        if self.status == "dead":
            raise EngineDeadError(f"The engine is dead: {told(self.error)}")
        self._loaded_engine()

    def _check_queue(self, engine: Engine, num_tokens: int) -> None:
        """On the engine's thread: raises `UnavailableError` where a limit is reached."""
        waiting, queued = engine.num_queued, engine.num_queued_tokens
        if self._max_requests is not None and waiting >= self._max_requests:
            self.metrics.rejected("queue_full")
            raise UnavailableError(
                f"{waiting} requests are waiting, and max_num_queued_reqs={self._max_requests}; "
                "try again later.",
                _BUSY_RETRY,
            )
        if self._max_tokens is not None and waiting and queued + num_tokens > self._max_tokens:
            self.metrics.rejected("queue_full")
            raise UnavailableError(
                f"{queued} prompt tokens are waiting and this request has {num_tokens}, and "
                f"max_num_queued_tokens={self._max_tokens}; try again later.",
                _BUSY_RETRY,
            )

    # ------------------------------------------------------------------ between the threads

    def _post(self, function: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Have a command run on the engine's thread."""
        if self._thread is None or self.status in ("dead", "closed"):
            raise EngineDeadError(f"The engine is {self.status}: {told(self.error)}")
        return self._thread.post(function)

    def _abort(self, request_id: str) -> None:
        with suppress(EngineDeadError):
            self._post(lambda engine: engine.abort(request_id))

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams and not self._submitting:
            self._idle.set()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            stream.push(output)
        self._note_idle()

    def _fail_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        if self._thread is not None:
            self._thread.refuse_all(error)
        self._note_idle()

    def _on_loaded(self) -> None:
        if self.status == "loading":
            self.status = "ready"
        if not self._loaded.done():
            self._loaded.set_result(None)

    def _on_death(self, error: BaseException) -> None:
        self.error = error
        if self.status != "closed":
            self.status = "dead"
        if not self._loaded.done():
            self._loaded.set_exception(as_exception(error))
        self._fail_all(EngineDeadError(f"The engine has died: {told(error)}"))


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None


def _info(engine: Engine, config: EngineConfig) -> EngineInfo:
    limits, scheduler = engine.intake.limits, engine.scheduler.config
    return EngineInfo(
        model=config.model,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        max_logprobs=limits.max_logprobs,
        num_blocks=scheduler.num_blocks,
        block_size=scheduler.block_size,
        dtype=engine.runner.dtype_name,
        cache_dtype=engine.runner.cache_dtype_name,
        attention_backend=engine.runner.attention_backend,
        deterministic=engine.runner.deterministic,
        tensor_parallel_size=engine.runner.num_devices,
        eos_token_ids=limits.eos_token_ids,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        scheduling_policy=scheduler.policy,
        enable_prefix_caching=scheduler.enable_prefix_caching,
    )
