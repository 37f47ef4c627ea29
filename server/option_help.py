"""`jaxpaged serve --help`: an overview that fits a screen, and more for whoever names a part."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import textwrap
from collections.abc import Sequence

from jaxpaged import flags
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from server import foreign_flags
from server.settings import ServerConfig

WIDTH = 98
GROUPS: dict[str, tuple[type, tuple[str, ...]]] = {
    "model": (
        EngineConfig,
        (
            *("model", "tokenizer", "skip_tokenizer_init", "revision", "load_format", "dtype"),
            *("seed", "generation_config", "chat_template", "max_logprobs"),
        ),
    ),
    "memory": (
        EngineConfig,
        (
            *("max_model_len", "block_size", "kv_cache_dtype", "gpu_memory_utilization"),
            *("device_memory_margin", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
            "enable_prefix_caching",
        ),
    ),
    "scheduling": (
        EngineConfig,
        (
            *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
            *("long_prefill_token_threshold", "scheduling_policy", "watermark"),
            "async_scheduling",
        ),
    ),
    "device": (
        EngineConfig,
        (
            *("tensor_parallel_size", "attention_backend", "kernel_tuning_table"),
            *("deterministic", "enforce_eager", "decode_buckets"),
            *("prefill_buckets", "compile_cache_dir", "compiled", "check_integrity", "record"),
            "disable_progress",
        ),
    ),
    "address": (
        ServerConfig,
        (
            *("served_model_name", "host", "port", "uds", "root_path", "ssl_keyfile"),
            *("ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
        ),
    ),
    "access": (
        ServerConfig,
        (
            *("api_key", "api_key_file", "metrics_auth", "allowed_origins", "allowed_methods"),
            *("allowed_headers", "allow_credentials", "trust_request_chat_template"),
        ),
    ),
    "answers": (
        ServerConfig,
        (
            *("default_chat_template_kwargs", "chat_template_content_format", "response_role"),
            *("stream_interval", "sse_keep_alive_interval", "enable_request_id_headers"),
            *("enable_prompt_tokens_details", "enable_force_include_usage"),
            *("enable_tokenizer_info_endpoint", "return_tokens_as_token_ids", "disable_page"),
        ),
    ),
    "limits": (
        ServerConfig,
        (
            *("max_num_queued_reqs", "max_num_queued_tokens", "max_request_bytes", "max_prompts"),
            *("max_n", "max_stop_strings", "max_tools", "request_stall_timeout"),
            "shutdown_timeout",
        ),
    ),
    "logs": (
        ServerConfig,
        (
            *("metrics_prefix", "disable_log_stats", "enable_log_requests", "enable_log_outputs"),
            *("max_log_len", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
            *("uvicorn_log_level", "log_level", "log_config_file"),
        ),
    ),
}
"""Heading -> class and fields."""

_USAGE = """\
usage: jaxpaged serve [MODEL] [flags]

Serve a model over HTTP with OpenAI's API, and a page to chat with it and watch its memory.
MODEL is a folder, a .gguf file, a hub id, or the alias of the small default model.

  jaxpaged serve                                     on http://127.0.0.1:8000, without a key
  jaxpaged serve models/my-llama --host 0.0.0.0 --api-key alice:SECRET
  jaxpaged serve --config server.yaml --port 8001
"""
_FOOTER = """\
--help=memory explains a group, --help=max-num-seqs one flag, --help=all everything. A flag is
also a variable (JAXPAGED_MAX_NUM_SEQS=8) and a key of the --config file (max-num-seqs: 8); the
command line wins over the environment, and that over the file. Switches have a --no- form.
"""


def asked(words: Sequence[str]) -> str | None:
    """The text that --help, --help=NAME or -h asks for; None without any of them.

    Raises `ConfigError` for a NAME that is neither a group nor a flag.
    """
    for word in words:
        if word == "--":
            return None
        if word in ("-h", "--help"):
            return overview()
        if word.startswith("--help="):
            return about(word.partition("=")[2])
    return None


def overview() -> str:
    """Every flag by name, in groups."""
    lines = [_USAGE]
    for title, (_, fields) in GROUPS.items():
        names = "  ".join(flags.flag_name(name) for name in fields)
        lines.append(
            textwrap.fill(
                names,
                WIDTH,
                initial_indent=f"{title:<12}",
                subsequent_indent=" " * 12,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines) + "\n\n" + _FOOTER


def about(name: str) -> str:
    """Flags with their meaning: all, those of a group, or a single one."""
    plain = name.strip().lstrip("-").replace("-", "_")
    if plain.lower() == "all":
        return "\n".join(_explain(title, cls, names) for title, (cls, names) in GROUPS.items())
    if plain.lower() in GROUPS:
        return _explain(plain.lower(), *GROUPS[plain.lower()])
    field = plain.removeprefix("no_")
    for title, (cls, names) in GROUPS.items():
        for one in (plain, field):
            if one in names:
                return _explain(title, cls, (one,))
    for cls in (EngineConfig, ServerConfig):
        if name == cls.__name__:
            parts = [(t, c, n) for t, (c, n) in GROUPS.items() if c is cls]
            return "\n".join(_explain(*part) for part in parts)
    dashed = plain.replace("_", "-")
    if dashed in foreign_flags.FLAGS:
        return f"--{dashed} is vLLM's: {foreign_flags.FLAGS[dashed].why}.\n"
    known = [*GROUPS, *(one.replace("_", "-") for _, names in GROUPS.values() for one in names)]
    near = difflib.get_close_matches(dashed, known, n=1)
    hint = f" Did you mean --help={near[0]}?" if near else ""
    raise ConfigError(f"--help={name}: no such flag or group.{hint}")


def _explain(title: str, cls: type, names: Sequence[str]) -> str:
    assert dataclasses.is_dataclass(cls)
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=WIDTH, max_help_position=6),
    )
    flags.add_flags(parser, cls, title, only=names)
    return parser.format_help()
