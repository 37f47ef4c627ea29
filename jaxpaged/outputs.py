"""What users read back: results of requests and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One candidate token: log-probability, rank (1 = likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobDict = dict[int, Logprob]
"""Token id -> Logprob at one position; the drawn (or given) token comes first."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while running."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS and everything else."""
    error: str | None = None
    """What went wrong, when finish_reason is "error"."""
    logprobs_mode: str | None = None
    """What the logprobs are of: "raw" (the model) or "processed" (what the tokens are drawn from);
    None without logprobs."""

    score: float | None = None
    """Of a beam search: cumulative_logprob over the length to the power of the length penalty."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of `time.monotonic()`; None: not yet."""

    arrival: float
    scheduled: float | None = None
    """First admission."""
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """All completions of one prompt so far (cumulative)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    prompt_logprobs: list[LogprobDict | None] | None = None
    """One entry a prompt token; the first is None."""
    times: RequestTimes | None = field(default=None, compare=False)
    num_preemptions: int = field(default=0, compare=False)
    """Of all its samples together."""


@dataclass(slots=True)
class EngineStats:
    """Counters since start (or gauges, where the text says so)."""

    num_running: int = 0
    """Gauge."""
    num_waiting: int = 0
    """Gauge."""
    peak_running: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (cached ones excluded)."""
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    forks: int = 0
    """Sequences that began by sharing the KV blocks of another one: samples and beams."""
    copied_blocks: int = 0
    """KV blocks copied before they were written, because others held them or could find them."""
    kv_usage: float = 0.0
    """Gauge: share of usable blocks held by requests, 0..1."""
    num_blocks: int = 0
    """Including the null block; usable blocks are one fewer."""
    block_size: int = 0
    """Tokens per block."""
    peak_blocks_used: int = 0
    kv_waste: float = 0.0
    """Allocated KV slots of running requests that hold no token, as a share of allocated slots,
    averaged over steps; a shared block counts once."""
    compiles: int = 0
    compiles_after_warmup: int = 0
    lazy_compiles: int = 0
    """Programs compiled on first use under enforce_eager."""
    compile_seconds: float = 0.0
    """Tracing and compiling, of all programs together."""
    failed_steps: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    """Finish reason -> count."""
