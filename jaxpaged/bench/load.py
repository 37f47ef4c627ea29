"""Sending the requests of a benchmark and recording what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.bench.metrics import Record
from jaxpaged.bench.prompts import Sample
from jaxpaged.bench.stream import Observer, failure_text
from jaxpaged.bench.wire import Client, WireError


def body_of(
    sample: Sample, model: str, *, chat: bool, ignore_eos: bool, extra: Mapping[str, Any]
) -> bytes:
    """The request as JSON. `extra` wins over what is here; a None in it leaves a field out."""
    fields: dict[str, Any] = {"model": model}
    if chat:
        content = [{"type": "text", "text": sample.prompt}]
        fields["messages"] = sample.messages or [{"role": "user", "content": content}]
        fields["max_completion_tokens"] = sample.output_tokens
    else:
        fields |= {
            "prompt": sample.prompt,
            "repetition_penalty": 1.0,
            "max_tokens": sample.output_tokens,
            "logprobs": None,
        }
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        fields["ignore_eos"] = True
    fields |= extra
    left_out = {name for name, value in extra.items() if value is None}
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in left_out})


class Sender:
    """Sends requests to one endpoint of a server."""

    def __init__(
        self,
        client: Client,
        path: str,
        *,
        count_tokens: Callable[[str], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`count_tokens` counts the tokens of answers for which the server gives no usage; without
        it a chunk counts as one.
        """
        self._client = client
        self._path = path
        self._count_tokens = count_tokens
        self._clock = clock
        self.without_usage = 0
        """Answers for which the server gave no usage."""

    async def __call__(self, sample: Sample, body: bytes) -> Record:
        observer = Observer()
        start = self._clock()
        try:
            answer = await self._client.request("POST", self._path, body, on_data=observer.feed)
        except WireError as error:
            problem: str | None = str(error)
        else:
            ok = answer.status == 200
            problem = observer.verdict() if ok else failure_text(answer.status, answer.body)
        end = self._clock()
        text = "".join(observer.texts)
        output_tokens = observer.output_tokens
        if output_tokens is None:
            self.without_usage += problem is None
            output_tokens = self._count_tokens(text) if self._count_tokens else len(observer.times)
        return Record(
            start=start,
            end=end,
            times=observer.times,
            prompt_tokens=observer.prompt_tokens or sample.prompt_tokens or 0,
            output_tokens=output_tokens,
            text=text,
            error=problem,
        )


Finished = Callable[[int, Record], None]
"""Gets the place of a request and its record."""


async def send_all(
    send: Callable[[int], Awaitable[Record]],
    times: Sequence[float],
    max_concurrency: int | None,
    on_finished: Finished,
) -> None:
    """Start request i at `times[i]` seconds from now, or later while `max_concurrency` are under
    way, and wait for all. Cancelled, it cancels those under way.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    gate = asyncio.Semaphore(max_concurrency or max(1, len(times)))

    async def one(index: int) -> None:
        try:
            on_finished(index, await send(index))
        finally:
            gate.release()

    async with asyncio.TaskGroup() as tasks:
        for index, at in enumerate(times):
            delay = began + at - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            await gate.acquire()
            tasks.create_task(one(index))
