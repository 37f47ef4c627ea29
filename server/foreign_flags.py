"""Flags of vLLM, today's and yesterday's, that are no settings here: why they do nothing, or what
is missing. Start commands are copied from server to server, so each gets an answer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError


@dataclass(frozen=True)
class Foreign:
    """One flag. `same` are the values that ask for what happens anyway; None is all of them."""

    why: str
    takes_value: bool = True
    same: tuple[str, ...] | None = None
    short: str | None = None


def _nothing(why: str, *, takes_value: bool = True, short: str | None = None) -> Foreign:
    return Foreign(why, takes_value=takes_value, short=short)


def _switch(why: str) -> Foreign:
    return Foreign(why, takes_value=False)


def _lacking(what: str, *same: str, takes_value: bool = True, short: str | None = None) -> Foreign:
    return Foreign(what, takes_value=takes_value, same=same, short=short)


_RECOMPUTED = "a preempted request is computed again; nothing is swapped to the host"
_ONE_PROCESS = "there is one process, with the engine in a thread of its own"
_COMPILED = "all programs are compiled at start; see --decode-buckets and --prefill-buckets"
_TEXT_ONLY = "models take text only"
_ADAPTERS = "LoRA adapters"
_REPLICAS = "replicas in one server; start several and put a balancer before them"
_TOOLS = "parsing of tool calls"
_OFFLOAD = "moving weights or KV blocks to the host"
_PIPELINE = "cutting a model by layers; use --tensor-parallel-size"
_HOSTS = "serving from several processes; use one, with --tensor-parallel-size for its devices"
_TRACES = "traces"
_SPECULATION = "speculative decoding"
_OBVIOUS = ("none", "None", "auto", "")

FLAGS: dict[str, Foreign] = {
    # Things that happen anyway, or that this engine does not need.
    "swap-space": _nothing(_RECOMPUTED),
    "preemption-mode": _nothing(_RECOMPUTED),
    "disable-log-requests": _switch("requests are logged only with --enable-log-requests"),
    "use-v2-block-manager": _switch("there is one block pool"),
    "calculate-kv-scales": _switch("an 8-bit KV cache always has its scales computed"),
    "num-lookahead-slots": _nothing("blocks are reserved as steps need them"),
    "num-scheduler-steps": _nothing("the next step is launched before the last one has ended"),
    "multi-step-stream-outputs": _nothing("see --stream-interval"),
    "disable-async-output-proc": _switch("see --no-async-scheduling"),
    "scheduler-delay-factor": _nothing("requests are admitted as soon as they fit"),
    "disable-frontend-multiprocessing": _switch(_ONE_PROCESS),
    "api-server-count": _nothing(_ONE_PROCESS, short="-asc"),
    "worker-use-ray": _switch(_ONE_PROCESS),
    "engine-use-ray": _switch(_ONE_PROCESS),
    "max-parallel-loading-workers": _nothing("each device reads its own slices"),
    "safetensors-load-strategy": _nothing("each device reads its own slices"),
    "use-tqdm-on-load": _switch("see --disable-progress"),
    "compilation-config": _nothing(_COMPILED, short="-O"),
    "cuda-graph-sizes": _nothing(_COMPILED),
    "cudagraph-capture-sizes": _nothing(_COMPILED),
    "max-cudagraph-capture-size": _nothing(_COMPILED),
    "max-seq-len-to-capture": _nothing(_COMPILED),
    "max-context-len-to-capture": _nothing(_COMPILED),
    "disable-custom-all-reduce": _switch("XLA makes the collectives"),
    "disable-cascade-attn": _switch("there is no such kernel"),
    "guided-decoding-backend": _nothing("structured outputs are not supported yet"),
    "structured-outputs-config": _nothing("structured outputs are not supported yet"),
    "prefix-caching-hash-algo": _nothing("prefixes are always hashed by SHA-256"),
    "logprobs-mode": _lacking("logprobs of processed logits", "raw_logprobs"),
    "device": _nothing("the device is JAX's; set JAX_PLATFORMS to choose"),
    "trust-remote-code": _switch("code that comes with a checkpoint is never run"),
    "disable-fastapi-docs": _switch("there is no documentation page, only /openapi.json"),
    "enable-server-load-tracking": _switch("/load is always there"),
    "limit-mm-per-prompt": _nothing(_TEXT_ONLY),
    "mm-processor-kwargs": _nothing(_TEXT_ONLY),
    "mm-processor-cache-gb": _nothing(_TEXT_ONLY),
    "disable-mm-preprocessor-cache": _switch(_TEXT_ONLY),
    "language-model-only": _switch(_TEXT_ONLY),
    "allowed-local-media-path": _nothing(_TEXT_ONLY),
    "task": _lacking("other tasks than text generation", "auto", "generate"),
    "runner": _lacking("other tasks than text generation", "auto", "generate"),
    "convert": _lacking("other tasks than text generation", "auto", "none"),
    "model-impl": _lacking("other implementations of a model", "auto", "vllm"),
    "max-loras": _nothing("there are no LoRA adapters"),
    "max-lora-rank": _nothing("there are no LoRA adapters"),
    "max-cpu-loras": _nothing("there are no LoRA adapters"),
    # Features that are missing. Values that ask for nothing are fine.
    "quantization": _lacking(
        "quantising on the fly; GGUF files are read as they are", *_OBVIOUS, "gguf", short="-q"
    ),
    "speculative-config": _lacking(_SPECULATION, *_OBVIOUS, "{}", short="-sc"),
    "speculative-model": _lacking(_SPECULATION, *_OBVIOUS),
    "num-speculative-tokens": _lacking(_SPECULATION, "0"),
    "spec-method": _lacking(_SPECULATION, *_OBVIOUS),
    "spec-model": _lacking(_SPECULATION, *_OBVIOUS),
    "spec-tokens": _lacking(_SPECULATION, "0"),
    "enable-lora": _lacking(_ADAPTERS, takes_value=False),
    "lora-modules": _lacking(_ADAPTERS),
    "pipeline-parallel-size": _lacking(_PIPELINE, "1", short="-pp"),
    "data-parallel-size": _lacking(_REPLICAS, "1", short="-dp"),
    "data-parallel-size-local": _lacking(_REPLICAS, "1", short="-dpl"),
    "data-parallel-backend": _lacking(_REPLICAS, "mp"),
    "decode-context-parallel-size": _lacking("cutting a context", "1", short="-dcp"),
    "enable-expert-parallel": _lacking(
        "placing whole experts; --tensor-parallel-size cuts them", takes_value=False
    ),
    "distributed-executor-backend": _lacking(_HOSTS, "mp", "uni"),
    "num-processes": _lacking(_HOSTS, "1"),
    "process-id": _lacking(_HOSTS, "0"),
    "coordinator": _lacking(_HOSTS, *_OBVIOUS),
    "nnodes": _lacking(_HOSTS, "1"),
    "node-rank": _lacking(_HOSTS, "0"),
    "cpu-offload-gb": _lacking(_OFFLOAD, "0", "0.0"),
    "kv-offloading-size": _lacking(_OFFLOAD, "0", *_OBVIOUS),
    "kv-transfer-config": _lacking(_OFFLOAD, *_OBVIOUS),
    "enable-sleep-mode": _lacking("sleeping", takes_value=False),
    "enable-auto-tool-choice": _lacking(_TOOLS, takes_value=False),
    "tool-call-parser": _lacking(_TOOLS, *_OBVIOUS),
    "tool-parser-plugin": _lacking(_TOOLS, *_OBVIOUS),
    "reasoning-parser": _lacking("splitting reasoning from the answer", *_OBVIOUS),
    "tokenizer-mode": _lacking("other tokenizers than the fast one", "auto", "hf"),
    "tokenizer-revision": _lacking("a tokenizer of another revision; see --tokenizer", *_OBVIOUS),
    "hf-token": _lacking("a token as a flag; set HF_TOKEN in the environment", *_OBVIOUS),
    "download-dir": _lacking("another folder by flag; set HF_HUB_CACHE", *_OBVIOUS),
    "hf-overrides": _lacking("changing a model's config.json by flag", *_OBVIOUS, "{}"),
    "override-generation-config": _lacking("changing sampling defaults by flag", *_OBVIOUS, "{}"),
    "rope-scaling": _lacking("other rotary positions than config.json's", *_OBVIOUS, "{}"),
    "middleware": _lacking("middleware by flag", *_OBVIOUS),
    "enable-per-request-metrics": _lacking("metrics in answers", takes_value=False),
    "otlp-traces-endpoint": _lacking(_TRACES, *_OBVIOUS),
    "collect-detailed-traces": _lacking(_TRACES, *_OBVIOUS),
    "ssl-ciphers": _lacking("choosing ciphers", *_OBVIOUS),
    "enable-ssl-refresh": _lacking("new certificates without a restart", takes_value=False),
    "tool-server": _lacking("running tools", *_OBVIOUS),
}


def note(name: str, value: Any, shown: str) -> str:
    """The warning about a flag that has no effect. `shown` is how the user wrote it.

    Raises `ConfigError` if it asks for a feature that is missing.
    """
    flag = FLAGS[name]
    if flag.same is None:
        return f"{shown} has no effect: {flag.why}."
    # A switch that a file turns off, or a value that means what is done anyway.
    if value is False or (value is not True and ("" if value is None else str(value)) in flag.same):
        return f"{shown} has no effect: that is what happens anyway."
    given = "" if value is True else f", got {str(value)[:80]!r}"
    raise ConfigError(f"{shown} is not supported yet ({flag.why}){given}. Leave it out.")
