"""ServerConfig: what it accepts, what it says about the rest, and what it never shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.flags import field_docs
from server.settings import ServerConfig, split_key


def test_defaults_are_valid_and_local() -> None:
    config = ServerConfig()
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.max_request_bytes == 16 * 2**20
    assert config.api_key is None


def test_every_field_has_a_text_and_a_check() -> None:
    docs = field_docs(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        assert docs.get(field.name), f"{field.name} has no text"
        with pytest.raises(ConfigError, match=f"^{field.name} must be "):
            ServerConfig(**{field.name: object()})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"port": 65536}, r"port must be an integer in \[0, 65535\], got 65536"),
        ({"port": True}, "port must be an integer"),
        ({"host": ""}, "host must be an address or host name; 0.0.0.0 is every IPv4 interface"),
        ({"root_path": "llm"}, "root_path must be a path such as /llm, got 'llm'"),
        ({"root_path": "/a?b"}, "root_path must be a path such as /llm"),
        ({"served_model_name": "one"}, "served_model_name must be a list of names"),
        ({"served_model_name": []}, "served_model_name must be a list of names"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 2}, "ssl_cert_reqs=2 needs ssl_ca_certs"),
        ({"max_request_bytes": "0"}, "max_request_bytes must be an integer >= 1"),
        ({"request_stall_timeout": 0}, "request_stall_timeout must be a number of seconds > 0"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout must be a number of seconds >= 0"),
        ({"metrics_prefix": "none"}, "metrics_prefix must be one of both, vllm, jaxpaged"),
        ({"disable_access_log_for_endpoints": ["health"]}, "a list of paths such as /health"),
        ({"default_chat_template_kwargs": {1: 2}}, "default_chat_template_kwargs must be"),
        ({"enable_log_outputs": True}, "enable_log_outputs needs enable_log_requests"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerConfig(**settings)


def test_an_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'port'"):
        ServerConfig.from_dict({"prot": 1})


def test_values_are_normalised() -> None:
    config = ServerConfig(
        root_path="/llm/", max_num_queued_tokens="8k", allowed_origins=["https://a.example"]
    )
    assert config.root_path == "/llm"
    assert config.max_num_queued_tokens == 8000
    assert config.allowed_origins == ("https://a.example",)


@pytest.mark.parametrize("keys", [["s3cret x"], ["s3cret\n"], ["näme-s3cret"], "s3cret", [""], []])
def test_bad_keys_are_refused_and_not_shown(keys: Any) -> None:
    with pytest.raises(ConfigError, match="not shown") as error:
        ServerConfig(api_key=keys)
    assert "s3cret" not in str(error.value)


def test_keys_are_not_in_the_repr() -> None:
    config = ServerConfig(api_key=("alice:s3cret",))
    assert "s3cret" not in repr(config)
    assert config.api_key == ("alice:s3cret",)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("alice:k", ("alice", "k")),
        ("k", (None, "k")),
        ("alice:k:l", ("alice", "k:l")),
        ("/:k", (None, "/:k")),
        ("alice:", (None, "alice:")),
    ],
)
def test_names_of_keys(text: str, parts: tuple[str | None, str]) -> None:
    assert split_key(text) == parts
