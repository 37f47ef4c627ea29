"""`jaxpaged chat`: talk to a server in the terminal."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from jaxpaged.chat_connection import URL, ChatError, Connection, clean
from jaxpaged.config import client_api_key

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""Fields of a request that have flags of their own."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

HELP = """\
/new          forget the conversation
/system TEXT  set the system message, and begin anew; without a text, have none
/retry        ask the last question again
/save FILE    write the conversation as JSON
/quit         leave, as Ctrl-D does
/help         this
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


def add_parser(commands: Any) -> None:
    """Add `chat` to the commands of `jaxpaged`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="talk to a server in the terminal",
        description="Talk to any server with OpenAI's API, line by line.",
        epilog="Within a chat:\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", default=URL, help=f"the server's API (default: {URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help="(default: $JAXPAGED_API_KEY or $OPENAI_API_KEY)"
    )
    parser.add_argument("--model", metavar="NAME", help="(default: the first that is served)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", help="ask this, print the answer and leave"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give up when the server sends nothing for so long (default: 600)",
    )
    for name in SAMPLING:
        whole = name in ("top_k", "seed", "max_tokens")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int if whole else float,
            metavar="N" if whole else "X",
            help="(default: the server's)",
        )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends. Returns the exit status."""
    sampling = {name: getattr(args, name) for name in SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if args.api_key is None:
        args.api_key = client_api_key()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal has every character
            stream.reconfigure(errors="replace")
    try:
        with Connection(args.url, args.api_key, args.timeout) as connection:
            model = args.model or connection.first_model()
            chat = Chat(connection, model, sampling, args.system, Screen(sys.stdout, sys.stderr))
            if args.quick is not None:
                return 0 if chat.ask(args.quick) else EXIT_INTERRUPTED
            return chat.loop(_input_lines(connection.url, model))
    except ChatError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED


def _input_lines(url: str, model: str) -> Iterator[str]:
    """Lines of standard input, with editing and history on a terminal."""
    if sys.stdin is None:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines then)
    sys.stderr.write(f"{clean(model)} at {url}; /help lists commands, Ctrl-D leaves.\n")
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:  # drops what was typed
            sys.stdout.write("\n")


@dataclass(slots=True)
class Answer:
    """One streamed answer, as far as it has come."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    """Of the answer, as the server counts."""
    seconds_to_first: float | None = None
    seconds: float = 0.0


class Screen:
    """Where answers go, and, dimly on a terminal only, remarks about them."""

    def __init__(self, out: TextIO, remarks: TextIO) -> None:
        self._out = out
        self._remarks = remarks
        self._dims = out.isatty() and remarks.isatty()

    def show(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def remark(self, text: str) -> None:
        """Something the user wants to know, but no part of an answer."""
        self._remarks.write(f"{text}\n")
        self._remarks.flush()

    def dim(self, text: str) -> None:
        if self._dims:
            self._remarks.write(f"{DIM}{text}{PLAIN}\n")
            self._remarks.flush()


@dataclass
class Chat:
    """A conversation with one model."""

    connection: Connection
    model: str
    sampling: dict[str, Any]
    system: str | None
    screen: Screen
    clock: Callable[[], float] = time.perf_counter
    messages: list[dict[str, str]] = field(default_factory=list)
    """Without the system message."""

    def loop(self, lines: Iterator[str]) -> int:
        """Answer line after line. Returns the exit status: 1 if the last question failed."""
        status = 0
        for line in _joined(lines):
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if not self._command(line):
                        break
                else:
                    self.ask(line)
                status = 0
            except ChatError as error:
                self.screen.remark(f"error: {error}")
                status = EXIT_FAILED
        return status

    def ask(self, question: str) -> bool:
        """Ask, and show the answer while it comes. False if Ctrl-C stopped it.

        Question and answer, also one that was stopped, are remembered unless the server fails.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": question})
        answer = Answer()
        stopped = False
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            stopped = True
        except ChatError:
            if answer.text:
                self.screen.show("\n")
            self.messages = before
            raise
        if answer.text or not stopped:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages = before
        self.screen.show("\n")
        self.screen.dim(_told(answer, stopped))
        return not stopped

    def _stream(self, answer: Answer) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
        began = self.clock()
        with closing(self.connection.stream(body)) as chunks:  # ends the request, if need be
            for chunk in chunks:
                answer.seconds = self.clock() - began
                if chunk.usage is not None:
                    answer.tokens = chunk.usage.completion_tokens
                for choice in chunk.choices or ():
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
                    if choice.delta is None:
                        continue
                    text = choice.delta.content or ""
                    thought = choice.delta.reasoning_content or choice.delta.reasoning
                    if answer.seconds_to_first is None and (text or thought):
                        answer.seconds_to_first = answer.seconds
                    answer.text += text
                    self.screen.show(clean(text))

    def _command(self, line: str) -> bool:
        """False to leave."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word in ("/quit", "/exit"):
            return False
        if word == "/new":
            self.messages.clear()
        elif word == "/system":
            self.system = rest or None
            self.messages.clear()
        elif word == "/retry":
            self._retry()
        elif word == "/save":
            self._save(rest)
        else:
            self.screen.remark(HELP if word == "/help" else f"no command {word}\n{HELP}")
        return True

    def _retry(self) -> None:
        if not self.messages:
            self.screen.remark("there is no question yet")
            return
        kept = list(self.messages)
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        try:
            self.ask(question)
        except ChatError:
            self.messages = kept
            raise

    def _save(self, name: str) -> None:
        if not name:
            self.screen.remark("/save needs the name of a file")
            return
        system = [{"role": "system", "content": self.system}] if self.system else []
        conversation = {"model": self.model, "messages": system + self.messages}
        try:
            Path(name).expanduser().write_text(
                json.dumps(conversation, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
        except (OSError, ValueError) as error:
            self.screen.remark(f"{name}: {getattr(error, 'strerror', None) or error}")
        else:
            self.screen.remark(f"saved to {name}")


def _joined(lines: Iterator[str]) -> Iterator[str]:
    r"""Lines that end in \ together with what follows them."""
    held: list[str] = []
    for line in lines:
        if line.endswith("\\"):
            held.append(line[:-1])
            continue
        yield "\n".join((*held, line))
        held.clear()
    if held:
        yield "\n".join(held)


def _told(answer: Answer, stopped: bool) -> str:
    parts = []
    if answer.tokens is not None:
        parts.append(f"{answer.tokens} tokens")
        rate = _rate(answer.tokens, answer.seconds_to_first, answer.seconds)
        if rate is not None:
            parts.append(f"{rate:.1f} tokens/s")
    if answer.seconds_to_first is not None:
        parts.append(f"first after {answer.seconds_to_first * 1000:.0f} ms")
    if stopped:
        parts.append("stopped")
    elif answer.finish_reason == "length":
        parts.append("cut at the token limit")
    return "[" + ", ".join(parts or ["no tokens"]) + "]"


def _rate(tokens: int, first: float | None, total: float) -> float | None:
    """Tokens per second after the first; None for a single one."""
    if first is None or tokens < 2 or total <= first:
        return None
    return (tokens - 1) / (total - first)
