"""`jaxpaged run-batch`: a file of requests in OpenAI's batch format, answered by the server's own
code without a network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jaxpaged import batch, flags
from jaxpaged.config import EngineConfig
from jaxpaged.errors import EngineDeadError
from jaxpaged.jobs import InputError

if TYPE_CHECKING:  # at run time these come once the arguments are right
    import httpx

    from jaxpaged.async_engine import AsyncEngine
    from jaxpaged.engine_thread import Build

URLS = ("/v1/chat/completions", "/v1/completions")
WINDOW = 4
"""Requests under way for each sequence that can run: the engine never waits for the next one."""
MAX_LINE = 64 * 2**20
"""Bytes of a line of the input."""
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

EPILOG = """\
A line of the input is
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
with a body as for the server; /v1/completions works too. A line of the output is
  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...",
   "body": {...}}, "error": null}
Results are written as they finish, not in the order of the input: custom_id tells them apart, and a
run that ends early keeps them. A request that is refused has the server's error as its body; a line
that is none has an error and no response. Files are local; - is standard input or output.
Exit status: 0, 1 when a request failed or results could not be written, 2 for wrong arguments or
input, 130 after Ctrl-C.
"""


def add_parser(commands: Any) -> None:
    """Add `run-batch` to the commands of `jaxpaged`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run-batch",
        help="answer a file of requests in OpenAI's batch format",
        usage="jaxpaged run-batch -i IN.jsonl -o OUT.jsonl [--model MODEL] [flags]",
        description="Answer a file of requests in OpenAI's batch format, without a server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="IN.jsonl", help="requests, one a line"
    )
    group.add_argument(
        "-o", "--output-file", required=True, metavar="OUT.jsonl", help="where results go"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what requests may call the model (default: the model as given)",
    )
    flags.add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, *, build: Build | None = None) -> int:
    """Answer the file with an engine, made by `build` if that is given. Returns the exit status."""
    config = EngineConfig.from_dict(flags.given(args, EngineConfig))
    out = None if args.output_file == "-" else args.output_file
    for flag, name in (("-i", args.input_file), ("-o", args.output_file)):
        if "://" in name:
            raise InputError(f"{flag} {name}: URLs are not supported; fetch the file, or use -.")
    source = _open_input(args.input_file)
    try:
        batch.check_out(out, args.input_file, "-o")
        with batch.LineWriter(out, "-o") as lines:
            return asyncio.run(_run(config, build, args.served_model_name, source, lines))
    except KeyboardInterrupt:
        from server.launch import leave_if_stuck

        sys.stderr.write("interrupted\n")
        leave_if_stuck(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    finally:
        if source != 0:
            os.close(source)


def _open_input(name: str) -> int:
    """A file descriptor."""
    if name == "-":
        return 0
    try:
        return os.open(name, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"-i {name}: {error.strerror}.") from error


async def _run(
    config: EngineConfig,
    build: Build | None,
    names: list[str] | None,
    source: int,
    lines: batch.LineWriter,
) -> int:
    from jaxpaged.async_engine import AsyncEngine
    from jaxpaged.progress import progress_bar
    from server.app import create_app
    from server.context import Context
    from server.metrics import HttpMetrics
    from server.settings import ServerConfig

    settings = ServerConfig(served_model_name=tuple(names) if names else None)
    engine = AsyncEngine(config, build=build)
    engine.start()
    try:
        await engine.wait_ready()
        app = create_app(Context(engine=engine, settings=settings, http=HttpMetrics()))
        with progress_bar(unit=" requests", disable=config.disable_progress) as bar:
            work = BatchRun(
                app,
                lines.write,
                window=WINDOW * engine.info.max_num_seqs,
                check=lambda: _check_alive(engine),
                on_finished=bar.update,
            )
            try:
                await work.run(source)
            finally:  # also of a run that was cut short
                bar.close()
                sys.stderr.write(work.summary() + "\n")
        return EXIT_FAILED if work.failed else 0
    finally:
        # A load that was interrupted cannot be stopped; it goes with the process.
        if engine.status != "loading":
            await engine.close()


def _check_alive(engine: AsyncEngine) -> None:
    if engine.status == "dead":
        raise EngineDeadError(f"The engine stopped: {engine.error}")


class BatchRun:
    """Lines in, lines out; at most `window` of them under way at once.

    `write` gets each result's line. `check` is called before each, and raises if there is no sense
    in going on. `on_finished` is called after each.
    """

    def __init__(
        self,
        app: Any,
        write: Callable[[str], None],
        *,
        window: int,
        check: Callable[[], None],
        on_finished: Callable[[], object],
    ) -> None:
        """`app` is an ASGI application."""
        self._app = app
        self._write = write
        self._window = window
        self._check = check
        self._on_finished = on_finished
        self._seen: set[str] = set()
        self._began = time.perf_counter()
        self.answered = 0
        """Requests with status 200."""
        self.failed = 0
        """All others, lines that are no request included."""
        self.prompt_tokens = 0
        self.output_tokens = 0

    async def run(self, source: int) -> None:
        """Answer every line of the file descriptor `source`. Cancelled, it aborts what runs."""
        import httpx

        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        reader = _LineReader(source, self._window)
        self._began = time.perf_counter()
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
                await self._run(reader, client)
        finally:
            reader.stop()

    async def _run(self, reader: _LineReader, client: httpx.AsyncClient) -> None:
        async def answer(number: int, line: bytes) -> None:
            try:
                result = await self._answer(number, line, client)
                self._check()
                self._write(_as_line(result))
                self._on_finished()
            finally:
                reader.done()

        try:
            async with asyncio.TaskGroup() as tasks:
                while (numbered := await reader.next()) is not None:
                    tasks.create_task(answer(*numbered))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others are of tasks that it stopped

    async def _answer(self, number: int, line: bytes, client: httpx.AsyncClient) -> dict[str, Any]:
        name = uuid.uuid4().hex
        result: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": None}
        try:
            url, body = self._parse(line, result)
        except _BadLine as bad:
            self.failed += 1
            message = f"line {number}: {bad.message}"
            return result | {"response": None, "error": {"code": bad.code, "message": message}}
        answer = await client.post(url, content=body, headers=_headers(name))
        try:
            content = answer.json()
        except ValueError:
            content = answer.text
        self._count(answer.status_code, content)
        response = {"status_code": answer.status_code, "request_id": name, "body": content}
        return result | {"response": response, "error": None}

    def _parse(self, line: bytes, result: dict[str, Any]) -> tuple[str, bytes]:
        """URL and body of a request. Puts the custom_id into `result`; raises `_BadLine`."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadLine("invalid_json", f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise _BadLine("invalid_json", "expected a JSON object")
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise _BadLine("invalid_custom_id", "custom_id must be a non-empty string")
        result["custom_id"] = custom_id
        if custom_id in self._seen:
            raise _BadLine("duplicate_custom_id", f"custom_id {custom_id!r} was there before")
        self._seen.add(custom_id)
        if fields.get("method", "POST") != "POST":
            raise _BadLine("invalid_method", "method must be POST")
        url = fields.get("url")
        if url not in URLS:
            raise _BadLine("invalid_url", f"url must be one of {', '.join(URLS)}")
        body = fields.get("body")
        if not isinstance(body, dict):
            raise _BadLine("invalid_body", "body must be an object")
        if body.get("stream"):
            raise _BadLine("invalid_body", "body.stream: results are whole; leave it out")
        try:
            return url, json.dumps(body).encode()
        except RecursionError:  # json.loads goes a little deeper
            raise _BadLine("invalid_json", "nested too deeply") from None

    def _count(self, status: int, content: Any) -> None:
        if status != 200:
            self.failed += 1
            return
        self.answered += 1
        usage = content.get("usage") if isinstance(content, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.output_tokens += usage.get("completion_tokens") or 0

    def summary(self) -> str:
        """A few lines about the run, in the words of `jaxpaged generate`."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        total = self.answered + self.failed
        return "\n".join(
            (
                f"requests     {total} in {seconds:.2f} s ({self.failed} failed)",
                f"prompt       {self.prompt_tokens} tokens, "
                f"{self.prompt_tokens / seconds:.1f} tokens/s",
                f"output       {self.output_tokens} tokens, "
                f"{self.output_tokens / seconds:.1f} tokens/s",
            )
        )


class _BadLine(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _as_line(result: dict[str, Any]) -> str:
    line = json.dumps(result, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only hold escaped
        return json.dumps(result)
    return line


def _headers(name: str) -> dict[str, str]:
    return {"content-type": "application/json", "x-request-id": name}


class _LineReader:
    """Reads lines in a thread of its own: the source may be a pipe that says nothing for hours.

    A line is read only while fewer than `window` are out, that is, not yet `done`. The thread is
    left behind where it cannot be stopped; it reads from the descriptor itself, without a buffer
    whose lock Python would wait for at its exit.
    """

    def __init__(self, source: int, window: int) -> None:
        self._source = source
        self._slots = threading.Semaphore(window)
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[tuple[int, bytes] | Exception | None] = asyncio.Queue()
        threading.Thread(target=self._read, name="run-batch-input", daemon=True).start()

    async def next(self) -> tuple[int, bytes] | None:
        """The next line that is not blank, and its number from 1; None after the last one.

        Raises `InputError`.
        """
        item = await self._lines.get()
        if isinstance(item, Exception):
            raise item
        return item

    def done(self) -> None:
        """A line that `next` gave has been dealt with."""
        self._slots.release()

    def stop(self) -> None:
        self._stopped = True
        self._slots.release()

    def _read(self) -> None:
        try:
            for number, line in enumerate(_lines_of(self._source), start=1):
                if not line.strip():
                    continue
                self._slots.acquire()
                if self._stopped:
                    return
                self._put((number, line))
            self._put(None)
        except (OSError, InputError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._put(InputError(f"-i: {reason}"))

    def _put(self, item: tuple[int, bytes] | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lines.put_nowait, item)


def _lines_of(source: int) -> Iterator[bytes]:
    """Lines without their ends, nor a byte order mark."""
    rest = b""
    first = True
    while data := os.read(source, 2**20):
        rest += data
        if first and len(rest) >= 3:
            rest, first = rest.removeprefix(b"\xef\xbb\xbf"), False
        *lines, rest = rest.split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE:
            raise InputError(f"a line has more than {MAX_LINE} bytes.")
    if rest:
        yield rest
