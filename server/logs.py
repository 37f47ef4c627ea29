"""Where messages go, and which."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError
from server.settings import ServerConfig

_OFFERS = ("Unsupported upgrade request", "No supported WebSocket library")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(settings: ServerConfig) -> None:
    """Messages go to standard error, or as the file says. Raises `ConfigError` for a bad file."""
    if settings.log_config_file is not None:
        _apply_file(settings.log_config_file)
    else:
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=FORMAT)
        for name in ("jaxpaged", "server"):
            logging.getLogger(name).setLevel(settings.log_level.upper())
        # uvicorn.error and uvicorn.access get theirs from uvicorn, which has a level more.
    logging.getLogger("uvicorn.access").addFilter(
        AccessFilter(settings.disable_access_log_for_endpoints, settings.root_path)
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)


class AccessFilter(logging.Filter):
    """Drops lines about some paths, and the query from all others: people put keys there."""

    def __init__(self, excluded: Collection[str], root_path: str) -> None:
        super().__init__()
        self._excluded = {path.rstrip("/") or "/" for path in excluded}
        self._root = root_path

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        path = str(args[2]).partition("?")[0]
        record.args = (*args[:2], path, *args[3:])
        return (path.removeprefix(self._root) or "/") not in self._excluded


def _is_news(record: logging.LogRecord) -> bool:
    # Java's client offers HTTP/2 with each of its requests, and each would be worth two warnings.
    return not str(record.msg).startswith(_OFFERS)


def _apply_file(name: str) -> None:
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
        config = _parse(name, text)
        config.setdefault("disable_existing_loggers", False)
        logging.config.dictConfig(config)
    except OSError as error:
        raise ConfigError(f"log_config_file {name}: {error.strerror}.") from error
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise ConfigError(f"log_config_file {name}: {error}{cause}.") from error


def _parse(name: str, text: str) -> dict[str, Any]:
    import yaml

    if name.endswith((".yaml", ".yml")):
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {error}") from None
    else:
        config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError("expected a mapping for logging.config.dictConfig")
    return config
