"""One request as the scheduler sees it: token ids, what is computed, and where its KV lives."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpaged.core.groups import Group


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again; its KV was given up and will be recomputed."""
    FINISHED = "finished"


class Request:
    """State of one request. Only the scheduler (and the KV manager) change it after creation.

    `eos_token_ids` is empty when EOS must not end the request. `skip_prefix_cache` forbids taking
    KV from the cache (every prompt position is wanted), not giving to it. `payload` is the
    caller's own. `max_tokens` 0 scores the prompt and draws nothing.
    """

    __slots__ = (
        "admission_order",
        "arrival_time",
        "awaits_fork",
        "block_hashes",
        "cache_salt",
        "capacity",
        "ending_ids",
        "eos_token_ids",
        "epoch",
        "error",
        "finish_reason",
        "fork_at",
        "group",
        "leader",
        "longest",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_inflight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "payload",
        "priority",
        "queue_order",
        "recompute_until",
        "request_id",
        "rope_length",
        "rope_regime",
        "shares_tail",
        "skip_prefix_cache",
        "slot",
        "slot_is_new",
        "status",
        "steady_until",
        "stop_reason",
        "stop_token_ids",
        "tables",
        "tail_hash",
        "token_ids",
        "trimmed_at",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_ids: Iterable[int] = (),
        stop_token_ids: Iterable[int] = (),
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        skip_prefix_cache: bool = False,
        payload: object = None,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(stop_token_ids)
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.skip_prefix_cache = skip_prefix_cache
        self.payload = payload

        self.token_ids = list(prompt_token_ids)
        """Prompt, then the outputs read so far."""
        self.num_prompt_tokens = len(self.token_ids)
        self.ending_ids = self.eos_token_ids | self.stop_token_ids
        self.longest = self.num_prompt_tokens + max_tokens
        """Tokens that end it, prompt included; the scheduler knows of a lower limit."""
        self.num_computed_tokens = 0
        """Positions whose KV is in the pool once every launched step has run."""
        self.num_hit_tokens = 0
        """Of those, what it found in the prefix cache when it was admitted last."""
        self.num_inflight = 0
        """Tokens that launched steps draw and nobody has read yet."""
        self.tables = [array("i")]
        """For each group of layers the block of each run of block_size positions; all of one
        length. The null block stands for those that a window has left behind. A buffer view must
        be dropped before the next `schedule`, which may have to change the table."""
        self.steady_until = 0
        """A row of one token that starts below this needs nothing but its place in a step: it has
        been decoding, its block has room and does not become full, nobody else holds or waits for
        it, and no token in flight can be its last."""
        self.capacity = 0
        """Positions that its tables reach to: their length times block_size."""
        self.trimmed_at = 0
        """`num_computed_tokens` when blocks behind the windows were given back last."""
        self.block_hashes: list[bytes] = []
        """Hash of every full block of `token_ids` (none when caching is off)."""
        self.tail_hash: bytes | None = None
        """Name of the prompt's last block where the prompt does not fill it; None if it does, and
        when caching is off."""
        self.num_registered_blocks = 0
        """Leading entries of the tables that are in the hash map, the null ones excepted."""
        self.rope_length = 0
        """Length in tokens that its rotary frequencies are chosen by; 0 if they are fixed."""
        self.rope_regime: int | str | None = None
        """What keeps its KV apart from that of equal tokens elsewhere; None for the usual
        frequencies. See `core/rope.py`."""
        self.slot = -1
        """Row of the per-sequence device state, in [0, max_num_seqs); -1 unless running."""
        self.slot_is_new = False
        """No row has been planned since it got its slot."""
        self.group: Group | None = None
        """The requests that it shares KV with from the start, and is admitted and set back with."""
        self.awaits_fork = False
        """Running, but another one of its group still computes what it will share."""
        self.leader: Request | None = None
        """That other one; None for a beam that has not begun."""
        self.fork_at = 0
        """Tokens at which others wait for it; 0 if nobody does."""
        self.shares_tail = False
        """Its last block may have other holders, and must be copied before it is written."""
        self.epoch = 0
        """Changes when the request ends, so that tokens that arrive later are known as stale."""
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        """stop, length, abort or error."""
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        """Prompt tokens taken from the prefix cache at the first admission."""
        self.num_preemptions = 0
        self.recompute_until = 0
        """Positions below this were computed before a preemption."""
        self.queue_order = -1
        """Rank among all requests added to the scheduler."""
        self.admission_order = -1
        """Rank among all first admissions."""

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"outputs={self.num_output_tokens}, computed={self.num_computed_tokens}, "
            f"inflight={self.num_inflight}, blocks={self.num_blocks})"
        )

    def inherit(self, parent: Request) -> None:
        """Become a sequence of the same tokens as another one of the same prompt."""
        assert self.num_prompt_tokens == parent.num_prompt_tokens
        self.token_ids = list(parent.token_ids)
        self.block_hashes = list(parent.block_hashes)
        self.tail_hash = parent.tail_hash
        self.rope_length, self.rope_regime = parent.rope_length, parent.rope_regime
        self.recompute_until = parent.recompute_until

    def stand_alone(self) -> None:
        """It waits for nobody, and nobody for it."""
        self.awaits_fork, self.leader, self.fork_at = False, None, 0

    @property
    def block_ids(self) -> array[int]:
        """The table of the first group of layers."""
        return self.tables[0]

    @property
    def num_blocks(self) -> int:
        """Length of each table, null entries included."""
        return len(self.tables[0])

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and outputs read."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_with_inflight(self) -> int:
        return len(self.token_ids) + self.num_inflight

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def only_scores(self) -> bool:
        """True if the prompt is computed for its logprobs and nothing is drawn."""
        return self.max_tokens == 0

    @property
    def is_beam(self) -> bool:
        return self.group is not None and self.group.is_beams

    def end_is_in_flight(self, max_model_len: int) -> bool:
        """True if a token not read yet ends the request for certain, so nothing may follow it."""
        if self.num_inflight == 0:
            return False
        total = len(self.token_ids) + self.num_inflight
        return total >= max_model_len or total - self.num_prompt_tokens >= self.max_tokens

    def stop_verdict(self, max_model_len: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the last token ends the request, else None.

        `min_tokens` holds back EOS and stop ids. It never holds back the length caps: a request
        that may neither end nor grow would keep its blocks for ever.
        """
        token, total = self.token_ids[-1], len(self.token_ids)
        outputs = total - self.num_prompt_tokens
        if outputs >= self.min_tokens:
            if token in self.eos_token_ids:
                return "stop", None
            if token in self.stop_token_ids:
                return "stop", token
        if outputs >= self.max_tokens or total >= max_model_len:
            return "length", None
        return None
