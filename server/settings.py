"""Server settings: frozen, validated once; every default with its unit. Unknown keys raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpaged import checks
from jaxpaged.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
CONTENT_FORMATS = ("auto", "string", "openai")
METRICS_PREFIXES = ("both", "vllm", "jaxpaged")
MAX_ITEMS = 1024
_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.+)", re.DOTALL)
_KEY = re.compile(r"[\x21-\x7e]{1,1024}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """All settings of the HTTP server. Names follow vLLM's; see `docs/server.md`.

    Raises `ConfigError` (a `ValueError`) for unknown, out-of-range or contradictory settings.
    """

    served_model_name: tuple[str, ...] | None = None
    """Names clients may use for the model, the first is told; None is the model as given."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 interface, :: every interface."""
    port: int = 8000
    """TCP port; 0 takes a free one and logs it."""
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of host and port."""
    root_path: str = ""
    """Path under which a reverse proxy offers the server, such as /llm."""
    ssl_keyfile: str | None = None
    """File with the TLS key (PEM)."""
    ssl_certfile: str | None = None
    """File with the TLS certificate chain (PEM); switches to https."""
    ssl_ca_certs: str | None = None
    """File with the authorities that clients' certificates are checked against (PEM)."""
    ssl_cert_reqs: int = 0
    """Clients' certificates: 0 not asked for, 1 optional, 2 required."""
    api_key: tuple[str, ...] | None = field(default=None, repr=False)
    """Keys that clients may use, each KEY or NAME:KEY; the name is what logs show."""
    api_key_file: str | None = None
    """File with more keys, one a line, as in api_key; # begins a comment."""
    metrics_auth: bool = True
    """Keys guard /metrics too; off where a scraper in a closed network has none."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the server (CORS); * is every one."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that those pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers that those pages may send."""
    allow_credentials: bool = False
    """Let those pages send cookies and such."""
    trust_request_chat_template: bool = False
    """Let a request bring its own chat template; it runs in a sandbox with a time limit."""
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables for the chat template, where a request does not set them."""
    chat_template_content_format: str = "auto"
    """What the template gets as content: string, openai (lists of parts), or auto to find out."""
    response_role: str = "assistant"
    """Role of the answers."""
    stream_interval: int = 1
    """Tokens between two chunks of a stream."""
    sse_keep_alive_interval: float = 15.0
    """Seconds of silence after which a stream sends a comment; 0 is never."""
    enable_request_id_headers: bool = False
    """Send X-Request-Id with every response."""
    enable_prompt_tokens_details: bool = True
    """Tell the cached tokens in usage."""
    enable_force_include_usage: bool = False
    """Send usage in every stream, asked for or not."""
    enable_tokenizer_info_endpoint: bool = True
    """Answer /tokenizer_info."""
    return_tokens_as_token_ids: bool = False
    """Write tokens as token_id:N in logprobs."""
    disable_page: bool = False
    """No web page at /."""
    max_num_queued_reqs: int | None = None
    """Requests that may wait for admission; more are answered 503. None is no limit."""
    max_num_queued_tokens: int | str | None = None
    """Prompt tokens that may wait for admission; more are answered 503. None is no limit."""
    max_request_bytes: int | str = "16MiB"
    """Largest request body, in bytes; larger ones are answered 413."""
    max_prompts: int = 1024
    """Most prompts in one request."""
    max_n: int = 128
    """Most completions of one prompt."""
    max_stop_strings: int = 32
    """Most stop strings in one request."""
    max_tools: int = 256
    """Most tools in one request."""
    request_stall_timeout: float = 120.0
    """Seconds one step may take before /health answers 503."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to end after SIGTERM or SIGINT; 0 aborts them at once."""
    metrics_prefix: str = "both"
    """Names of the metrics: vllm, jaxpaged, or both."""
    disable_log_stats: bool = False
    """No line about throughput and load every 10 seconds."""
    enable_log_requests: bool = False
    """Log requests with their parameters; prompts too at log level debug."""
    enable_log_outputs: bool = False
    """Log what was answered as well; needs enable_log_requests."""
    max_log_len: int | None = None
    """Characters of a prompt or an answer that are logged; None is all."""
    disable_uvicorn_access_log: bool = False
    """No line for each HTTP request."""
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    """Paths without such a line, such as /health,/metrics."""
    uvicorn_log_level: str = "info"
    """Level of the HTTP server's own messages."""
    log_level: str = "info"
    """Level of our messages: debug, info, warning, error or critical."""
    log_config_file: str | None = None
    """JSON or YAML file for Python's logging.config.dictConfig; replaces the other log flags."""

    def __post_init__(self) -> None:
        checks.normalise(self, _CHECKS, _error)
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs ssl_certfile, the server's certificate.")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, the authorities to check "
                "clients' certificates against."
            )
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ConfigError("enable_log_outputs needs enable_log_requests.")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ServerConfig:
        """Build from a mapping. An unknown name raises `ConfigError` and shows the nearest one."""
        checks.check_names(settings, cls, "settings", "server setting", _error)
        return cls(**settings)


def split_key(text: str) -> tuple[str | None, str]:
    """Name (None without one) and key. Only the part after the first colon is the key then."""
    match = _NAMED_KEY.fullmatch(text)
    return (match[1], match[2]) if match else (None, text)


def api_key(value: Any) -> str:
    """Check of one KEY or NAME:KEY. The value never gets into a message."""
    # Other characters reach the server in one of several encodings, or not at all.
    rule = "keys of 1 to 1024 printable ASCII characters without spaces, or NAME:KEY"
    if not isinstance(value, str) or not _KEY.fullmatch(split_key(value)[1]):
        raise checks.Broken(rule, "one that is not (and is not shown)")
    return value


def _error(message: str, _name: str) -> ConfigError:
    return ConfigError(message)


def _texts(item: checks.Check, rule: str) -> checks.Check:
    check = checks.list_of(item, rule, MAX_ITEMS, "of them")

    def check_all(value: Any) -> tuple[str, ...]:
        return tuple(check(value))

    return check_all


def _at_least_one(item: checks.Check, rule: str) -> checks.Check:
    check = _texts(item, rule)

    def check_all(value: Any) -> tuple[str, ...]:
        found: tuple[str, ...] = check(value)
        if not found:
            raise checks.Broken(rule)
        return found

    return check_all


def _keys(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not value:  # an empty list would mean: no protection
        raise checks.Broken("a list of at least one key", "a value that is not shown")
    try:
        return tuple(api_key(one) for one in value)
    except TypeError:
        raise checks.Broken("a list of keys", "a value that is not shown") from None


def _root_path(value: Any) -> str:
    rule = "a path such as /llm"
    path = str(checks.text(rule, empty=True)(value)).rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise checks.Broken(rule)
    return path


def _endpoint(value: Any) -> str:
    path = str(checks.text("a path such as /health")(value))
    if not path.startswith("/"):
        raise checks.Broken("a path such as /health")
    return path


_SWITCH = checks.boolean
_FILE = checks.optional(checks.text("the path of a file"))
_SECONDS = checks.number("a number of seconds >= 0", lambda x: x >= 0)
_WORDS = _texts(checks.text(), "a list of texts")
_CHECKS: dict[str, checks.Check] = {
    "served_model_name": checks.optional(_at_least_one(checks.text(), "a list of names")),
    "host": checks.text("an address or host name; 0.0.0.0 is every IPv4 interface"),
    "port": checks.integer(0, 65535),
    "uds": checks.optional(checks.text("the path of a socket")),
    "root_path": _root_path,
    "ssl_keyfile": _FILE,
    "ssl_certfile": _FILE,
    "ssl_ca_certs": _FILE,
    "ssl_cert_reqs": checks.integer(0, 2),
    "api_key": checks.optional(_keys),
    "api_key_file": _FILE,
    "metrics_auth": _SWITCH,
    "allowed_origins": _WORDS,
    "allowed_methods": _WORDS,
    "allowed_headers": _WORDS,
    "allow_credentials": _SWITCH,
    "trust_request_chat_template": _SWITCH,
    "default_chat_template_kwargs": checks.optional(
        checks.mapping_of(
            checks.text(), lambda value: value, "a mapping with texts as keys", MAX_ITEMS, "of them"
        )
    ),
    "chat_template_content_format": checks.choice(*CONTENT_FORMATS),
    "response_role": checks.text("the name of a role"),
    "stream_interval": checks.integer(1),
    "sse_keep_alive_interval": _SECONDS,
    "enable_request_id_headers": _SWITCH,
    "enable_prompt_tokens_details": _SWITCH,
    "enable_force_include_usage": _SWITCH,
    "enable_tokenizer_info_endpoint": _SWITCH,
    "return_tokens_as_token_ids": _SWITCH,
    "disable_page": _SWITCH,
    "max_num_queued_reqs": checks.optional(checks.integer(0)),
    "max_num_queued_tokens": checks.optional(checks.size(0)),
    "max_request_bytes": checks.size(1),
    "max_prompts": checks.integer(1),
    "max_n": checks.integer(1),
    "max_stop_strings": checks.integer(1),
    "max_tools": checks.integer(1),
    "request_stall_timeout": checks.number("a number of seconds > 0", lambda x: x > 0),
    "shutdown_timeout": _SECONDS,
    "metrics_prefix": checks.choice(*METRICS_PREFIXES),
    "disable_log_stats": _SWITCH,
    "enable_log_requests": _SWITCH,
    "enable_log_outputs": _SWITCH,
    "max_log_len": checks.optional(checks.integer(0)),
    "disable_uvicorn_access_log": _SWITCH,
    "disable_access_log_for_endpoints": _texts(_endpoint, "a list of paths such as /health"),
    "uvicorn_log_level": checks.choice("trace", *LOG_LEVELS),
    "log_level": checks.choice(*LOG_LEVELS),
    "log_config_file": _FILE,
}
