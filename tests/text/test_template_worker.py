"""Templates of clients: the same answers from a process that can be ended."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text import template_worker
from jaxpaged.text.template_worker import render_in_worker
from jaxpaged.text.tokenizer import Tokenizer
from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

USER = [{"role": "user", "content": "q <é> 中 \u2028 \x00"}]
ROOT = Path(__file__).resolve().parent.parent.parent


def _tokenizer() -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer(),
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        chat_templates={"default": CHAT_TEMPLATE},
    )


def test_the_worker_renders_what_the_server_would() -> None:
    tokenizer = _tokenizer()
    template = CHAT_TEMPLATE + "{{ tools | tojson }}{{ mode }}"
    options: dict[str, Any] = {
        "chat_template": template,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"mode": "m"},
    }
    text, ids = tokenizer.render_chat(USER, **options)
    assert tokenizer.render_chat(USER, untrusted=True, **options) == (text, ids)
    assert text.endswith("m") and ids[0] == 0


def test_the_model_s_template_needs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    tokenizer = _tokenizer()
    assert tokenizer.render_chat(USER, untrusted=True) == tokenizer.render_chat(USER)
    with pytest.raises(AssertionError, match="a process was started"):
        tokenizer.render_chat(USER, untrusted=True, chat_template="x")


@pytest.mark.parametrize(
    ("template", "options", "message", "param"),
    [
        ("{% for %}", {}, r"not valid Jinja: .*\(line 1\)", "chat_template"),
        ("{{ 1 / 0 }}", {}, "refused the messages: division by zero", "messages"),
        ("{{ [].__class__.__base__ }}", {}, "unsafe", "messages"),
        ("{{ 'x' * 999999999 }}", {}, "makes a text of more than", "messages"),
        ("{{ strftime_now('%Y') }}{{ a.b }}", {}, "'a' is undefined", "messages"),
        ("x", {"variables": {"tools": 1}}, "must not hold 'tools'", "chat_template_kwargs"),
        ("x", {"variables": {"a": {1, 2}}}, "must be JSON values", "messages"),
        ("x", {"content_format": "y"}, "must be one of auto", "chat_template_content_format"),
    ],
)
def test_errors_come_back(template: str, options: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render_in_worker(template, {}, USER, options)
    assert caught.value.param == param
    assert "/" not in re.sub("https?://", "", str(caught.value))
    if "JSON values" not in message:
        with pytest.raises(InvalidRequestError, match="role must be one of"):
            render_in_worker("x", {}, [{"role": "robot", "content": "x"}], {})


def test_endless_templates_end_soon() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="ran for more than 0.5 s|printed more than"):
        render_in_worker(loops, {}, USER, {})
    assert time.monotonic() - started < 8  # 0.7 s on an idle machine


def test_other_threads_go_on_meanwhile() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    done = threading.Event()

    def work() -> None:
        with pytest.raises(InvalidRequestError):
            render_in_worker(loops, {}, USER, {})
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.wait(0.01):
        turns += 1
        assert turns < 3000
    thread.join(timeout=10)
    assert turns > 10


def _child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Stand in for a template that got out of the sandbox."""
    limited = (
        "import sys; sys.path[:] = sys.argv[1:]; "
        "from jaxpaged.text import template_worker as w; w._import_all(); w._limit_myself()\n"
    )
    monkeypatch.setattr(template_worker, "_CODE", limited + code)


@pytest.mark.parametrize(
    "code",
    ["x = 'x' * 10**9", "while True: pass", "sys.exit(3)", "print('no answer')"],
    ids=["memory", "time", "exit", "words"],
)
def test_what_the_sandbox_misses_the_system_ends(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _child(monkeypatch, code)
    if "while" in code:  # the child's own limit is too long for a test
        monkeypatch.setattr(template_worker, "MAX_WALL_SECONDS", 1.0)
    with pytest.raises(InvalidRequestError, match="The chat template was ended: ") as caught:
        render_in_worker("x", {}, USER, {})
    assert caught.value.param == "chat_template"


def test_the_child_can_open_nothing_and_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_API_KEY", "secret")
    _child(
        monkeypatch,
        "import json, os\n"
        "tried = []\n"
        "for what in (lambda: open('/etc/hostname'), lambda: __import__('socket').socket(),\n"
        "             lambda: os.pipe(), lambda: os.dup(0)):\n"
        "    try: what(); tried.append('done')\n"
        "    except (OSError, ImportError): tried.append('refused')\n"
        "env = [k for k in os.environ if k.startswith('JAXPAGED')]\n"
        "print(json.dumps([' '.join(tried + env), None, None]))\n",
    )
    assert render_in_worker("x", {}, USER, {}) == "refused refused refused refused"


def test_limits_of_time_and_memory_are_set() -> None:
    code = (
        "import resource as r, sys; sys.path[:] = sys.argv[1:]\n"
        "from jaxpaged.text import template_worker as w; w._import_all(); w._limit_myself()\n"
        "print(*(r.getrlimit(k)[1] for k in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE)))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, str(ROOT), *sys.path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.split() == [str(768 * 2**20), "4", "0"]
