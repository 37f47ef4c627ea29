"""Set-up of logging: files for dictConfig, and what is kept out of the access log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.errors import ConfigError
from server import logs
from server.logs import AccessFilter
from server.settings import ServerConfig


def line(path: str) -> logging.LogRecord:
    args: Any = ("127.0.0.1:1", "GET", path, "1.1", 200)
    text = '%s - "%s %s HTTP/%s" %d'
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, text, args, None)


def test_the_access_log_leaves_out_endpoints_and_queries() -> None:
    chosen = AccessFilter(["/health", "/metrics/"], "/llm")
    assert not chosen.filter(line("/health"))
    assert not chosen.filter(line("/llm/metrics?x=1"))
    record = line("/v1/models?api_key=k")
    assert chosen.filter(record)
    assert record.getMessage() == '127.0.0.1:1 - "GET /v1/models HTTP/1.1" 200'
    assert chosen.filter(line("/healthy"))


def test_other_records_pass() -> None:
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "plain", (), None)
    assert AccessFilter(["/health"], "").filter(record)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("log.yaml", "a: [", "not YAML"),
        ("log.json", "{", "Expecting property name"),
        ("log.yaml", "- 1", "expected a mapping"),
        ("log.json", '{"version": 2}', "Unsupported version: 2"),
        ("log.yaml", "version: 1\nhandlers: {a: {class: no.such.Handler}}", "handler 'a' .*no"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^log_config_file .*{name}: .*{reason}"):
        logs.set_up(ServerConfig(log_config_file=str(path)))
