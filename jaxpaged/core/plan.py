"""What the scheduler is told (settings) and what it says (steps, rows, results)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxpaged.config import SCHEDULING_POLICIES
from jaxpaged.core.kv_groups import MAX_GROUPS, Copy, Windows, blocks_for_sequence
from jaxpaged.core.request import Request
from jaxpaged.core.rope import ROPE_RULES
from jaxpaged.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler. Raises `ConfigError` for settings that contradict each other.

    `num_blocks` includes the null block; `block_size`, `max_num_batched_tokens`, `max_model_len`
    and `long_prefill_token_threshold` (0: no limit) are in tokens. `watermark` is the share of the
    usable blocks that an admission must leave free while anything runs. `windows` has one entry for
    each group of layers: its window in tokens, None for full attention. `rope_rule` (see
    `core/rope.py`) says how the rotary frequencies follow from a sequence's length, with
    `rope_threshold` in tokens.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    windows: Windows = (None,)
    rope_rule: str = "fixed"
    rope_threshold: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("num_blocks", 2),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 1),
            ("long_prefill_token_threshold", 0),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}.")
        if self.policy not in SCHEDULING_POLICIES:
            choices = ", ".join(SCHEDULING_POLICIES)
            raise ConfigError(f"policy must be one of {choices}, got {self.policy!r}.")
        self._check_model()
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs="
                f"{self.max_num_seqs}, so not every sequence could decode in a step. Raise the "
                "first or lower the second."
            )
        if self.enable_chunked_prefill:
            return
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len="
                f"{self.max_model_len} while chunked prefill is off, so a long prompt could never "
                "be computed. Raise the first, lower the second, or enable chunked prefill."
            )
        if self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts "
                "into chunks and so needs enable_chunked_prefill."
            )

    def _check_model(self) -> None:
        if not 1 <= len(self.windows) <= MAX_GROUPS:
            raise ConfigError(
                f"windows must have 1 to {MAX_GROUPS} entries, one for each group of layers, got "
                f"{len(self.windows)}."
            )
        for window in self.windows:
            if window is not None and window < 1:
                raise ConfigError(f"each of windows must be None or at least 1, got {window}.")
        if self.rope_rule not in ROPE_RULES:
            choices = ", ".join(ROPE_RULES)
            raise ConfigError(f"rope_rule must be one of {choices}, got {self.rope_rule!r}.")
        if self.rope_rule != "fixed" and self.rope_threshold < 1:
            raise ConfigError(
                f"rope_threshold must be at least 1 with rope_rule={self.rope_rule!r}, got "
                f"{self.rope_threshold}."
            )

    def blocks_for_sequence(self, num_tokens: int) -> int:
        """The most blocks, over all groups, that a request holds on its way to this length."""
        return blocks_for_sequence(
            num_tokens,
            block_size=self.block_size,
            windows=self.windows,
            max_tokens_in_step=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free while anything runs."""
        if self.watermark == 0.0:
            return 0
        return max(1, math.ceil(self.watermark * (self.num_blocks - 1)))


@dataclass(slots=True)
class ScheduledRow:
    """`num_tokens` positions of one request from `start` on, computed in one step.

    `samples`: the last of them draws a token. `admitted`: the first row since the request got its
    slot and blocks, new or resumed. `epoch` is the request's when the row was planned; a row whose
    epoch is no longer the request's is stale and its results are dropped.

    A sample that has just been forked computes nothing (`num_tokens` 0, `start` behind the prompt):
    it draws its first token from the logits of row `source` of the same step; so does a request
    whose whole prompt is that row's.
    """

    request: Request
    epoch: int
    start: int
    num_tokens: int
    samples: bool
    admitted: bool
    source: int = -1


@dataclass(slots=True)
class ScheduledStep:
    """One step: what to launch now. `preempted` lost their blocks and slots while it was planned.
    `copies` are pairs of blocks, source and destination, to be copied before the step writes any
    KV, all sources being read before any destination is written.

    Requests that ran before come first, then samples that have just been forked from them, then
    those admitted now with their samples. Every step is either launched as it is, before any other
    call that changes the scheduler, or given to `Scheduler.fail_steps`: its blocks are already
    findable by others.
    """

    step_id: int
    rows: list[ScheduledRow]
    num_tokens: int
    preempted: list[Request]
    copies: list[Copy] = field(default_factory=list)


@dataclass(slots=True)
class TokenResult:
    """One token of a request; None when a request that only scores its prompt has ended, and for a
    beam, whose candidates have come. `index` is that of its row in the step."""

    request: Request
    token: int | None
    finished: bool
    index: int
