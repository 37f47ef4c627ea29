"""Templates from clients run in a process of their own, which can be ended from outside.

The sandbox's limits hold for every template we could think of. But whoever may send a template
tries many, and one call into C code that our list of checks misses would hold the whole server: a
thread cannot be killed. A process can, and the system bounds its memory, its time and what it can
open. It costs about 0.2 s a request, on a path that is off unless the operator allows it. Templates
that come with the model are the operator's choice, and run in the server under the sandbox alone.

The child gets nothing from its parent but the request: no environment variables, no open files.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.errors import InvalidRequestError

RENDER_SECONDS = 0.5
"""Processor time that the sandbox allows a client's template."""
MAX_WALL_SECONDS = 10.0
"""After this the process is killed, however busy the machine is."""
_CPU_SECONDS = 4
_MEMORY_BYTES = 768 * 2**20
_CODE = (
    "import sys; sys.path[:] = sys.argv[1:]; from jaxpaged.text.template_worker import main; main()"
)


def render_in_worker(
    template: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> str:
    """`ChatTemplate(template, special_tokens).render(messages, **options)` in a new process.

    Raises `InvalidRequestError` as that does, and when the process had to be ended.
    """
    try:
        work = json.dumps([template, dict(special_tokens), messages, dict(options)])
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"The messages, tools and chat_template_kwargs must be JSON values: {error}.",
            param="messages",
        ) from error
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _CODE, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LANG": "C.UTF-8"},
    )
    with process:
        try:
            answer, _ = process.communicate(work.encode("ascii"), timeout=MAX_WALL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise _ended(f"it ran for more than {MAX_WALL_SECONDS:g} s") from error
        finally:
            process.kill()
    try:
        text, message, param = json.loads(answer)
    except ValueError as error:
        raise _ended("it used up the time or memory that it may use") from error
    if text is None:
        raise InvalidRequestError(message, param)
    return str(text)


def main() -> None:
    """The child: work in by stdin, [text, error, param] out by stdout."""
    from jaxpaged.text.chat import ChatTemplate

    template, special_tokens, messages, options = json.load(sys.stdin.buffer)
    _import_all()
    _limit_myself()
    result: list[str | None]
    try:
        text = ChatTemplate(template, special_tokens).render(
            messages, seconds=RENDER_SECONDS, **options
        )
        result = [text, None, None]
    except InvalidRequestError as error:
        result = [None, str(error), error.param]
    sys.stdout.write(json.dumps(result))


def _import_all() -> None:
    """What a template may need and Python or Jinja load when first used: no file opens later."""
    from jaxpaged.text.chat import ChatTemplate

    user = [{"role": "user", "content": "x"}]
    for text in ("{{ strftime_now('%c') }}{{ [1] | tojson }}", "{{ x.y }}", "{{", "{{ x | no }}"):
        with contextlib.suppress(InvalidRequestError):
            ChatTemplate(text, {}).render(user)


def _limit_myself() -> None:
    """From here on: no new files or sockets, and only so much memory and time."""
    import resource

    for what, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),  # those that are open: stdin, stdout, stderr
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _ended(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The chat template was ended: {why}.", param="chat_template")
