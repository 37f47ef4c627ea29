"""A device without a device: a KV store of ints behind the scheduler, and what it must produce.

The value stored at a position folds in the value before it, *as read through a block table*, and
the token; the first one starts from the regime of the rotary frequencies. So a block that is stale,
misplaced, of another group of layers or regime, or not written yet changes every later token, and a
request that read anything wrong cannot give the expected output. Besides, every position that a row
sees in any group is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import (
    ScheduledRow,
    ScheduledStep,
    Scheduler,
    SchedulerConfig,
    TokenResult,
)

VOCAB = 50
_MASK = 2**64 - 1


def make_config(**changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "num_blocks": 1000,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "watermark": 0.0,
    }
    return SchedulerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def make_request(name: str, prompt: Iterable[int], max_tokens: int = 8, **more: object) -> Request:
    more.setdefault("arrival_time", 0.0)
    return Request(name, list(prompt), max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def fold(value: int, token: int) -> int:
    mixed = (value ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ (mixed >> 29)


def draw(value: int) -> int:
    return (value >> 33) % VOCAB


def rope_seed(config: SchedulerConfig, length: int) -> int:
    """What the values of a sequence start from, by the length that its frequencies follow."""
    if config.rope_rule == "fixed" or length <= config.rope_threshold:
        return 0
    return 7 if config.rope_rule == "longrope" else length


def value_of(tokens: Sequence[int], seed: int) -> int:
    """The value at the last of these positions."""
    for token in tokens:
        seed = fold(seed, token)
    return seed


def expected_output(request: Request, config: SchedulerConfig) -> tuple[list[int], str]:
    """Output and finish reason of an undisturbed run, by a plain loop."""
    tokens = list(request.prompt_token_ids)
    value = value_of(tokens, rope_seed(config, len(tokens)))
    outputs: list[int] = []
    while len(outputs) < request.max_tokens and len(tokens) < config.max_model_len:
        token = draw(value)
        outputs.append(token)
        tokens.append(token)
        value = fold(value, token)
        if config.rope_rule == "longrope" and len(tokens) == config.rope_threshold + 1:
            value = value_of(tokens, rope_seed(config, len(tokens)))
        if len(outputs) >= request.min_tokens and (
            token in request.eos_token_ids or token in request.stop_token_ids
        ):
            return outputs, "stop"
    return outputs, "length"


class Sim:
    """Drives a scheduler with at most `depth` steps in flight and checks every step."""

    def __init__(self, config: SchedulerConfig, *, depth: int = 2, check: bool = True) -> None:
        self.scheduler = Scheduler(config)
        self.depth = depth
        self.check = check
        self.store: dict[int, list[int]] = {}
        """Block -> for each of its slots the value plus the group of layers that wrote it."""
        self.values: dict[tuple[Request, int], list[int]] = {}
        """(Request, what its values start from) -> the value at each position."""
        self.last_by_slot: dict[int, int] = {}
        self.queue: deque[tuple[ScheduledStep, list[int]]] = deque()
        self.requests: list[Request] = []
        self.delivered: dict[Request, list[int]] = {}
        self.ended: dict[Request, int] = {}
        """Request -> how often a result said that it ended."""
        self.steps: list[ScheduledStep] = []
        self.admitted: list[Request] = []
        self.hits: dict[Request, list[int]] = {}
        """Request -> where each of its admissions started."""
        self.computed: dict[Request, int] = {}
        """Request -> positions launched, recomputed ones included."""

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        self.delivered[request] = []
        return request

    def launch(self) -> ScheduledStep | None:
        """Plan a step and run it on the fake device; its tokens wait in `queue`."""
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step)
            self.queue.append((step, [self._run_row(row) for row in step.rows]))
            for row in step.rows:  # a step writes all KV of a layer before it reads any
                self._check_all_that_it_sees(row)
            self.steps.append(step)
        if self.check:
            self.scheduler.check_integrity()
        return step

    def read(self) -> list[TokenResult]:
        """Give the oldest step's tokens to the scheduler."""
        step, tokens = self.queue.popleft()
        results = self.scheduler.update(step, tokens)
        for result in results:
            assert result.request not in self.ended, "a result after the end"
            if result.token is not None:
                self.delivered[result.request].append(result.token)
            if result.finished:
                self.ended[result.request] = self.ended.get(result.request, 0) + 1
        if self.check:
            self.scheduler.check_integrity()
        return results

    def turn(self) -> ScheduledStep | None:
        """One turn of an engine's loop: launch the next step, read the one before."""
        step = self.launch()
        if self.queue and (step is None or len(self.queue) >= self.depth):
            self.read()
        return step

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished and not self.queue:
                return
            self.turn()
        raise AssertionError(f"no end after {limit} turns")

    def until(self, done: Callable[[], object], limit: int = 1000) -> ScheduledStep | None:
        """Turn until `done()` holds; the step planned last. Fails if that never happens."""
        for _ in range(limit):
            step = self.turn()
            if done():
                return step
        raise AssertionError(f"it did not happen in {limit} turns")

    def fail(self, error: str = "device lost") -> list[Request]:
        """Everything launched fails; the pool's contents are gone."""
        steps = [step for step, _ in self.queue]
        self.queue.clear()
        self.store.clear()
        failed = self.scheduler.fail_steps(steps, error)
        if self.check:
            self.scheduler.check_integrity()
        return failed

    def assert_outputs(self, *, allow_failed: bool = False) -> None:
        """Everything that ended by itself delivered exactly what an undisturbed run gives; all
        others a beginning of it. Nothing is left behind."""
        for request in self.requests:
            tokens, reason = expected_output(request, self.scheduler.config)
            got = self.delivered[request]
            assert request.is_finished
            assert got == request.output_token_ids
            if request.finish_reason in ("stop", "length"):
                assert (got, request.finish_reason) == (tokens, reason), request
                assert self.ended[request] == 1
            else:
                assert got == tokens[: len(got)]
                assert request.finish_reason == "abort" or allow_failed, request.error
        self.assert_drained()

    def assert_drained(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
        assert not any(any(r.tables) or r.slot != -1 for r in self.requests)

    def _check_step(self, step: ScheduledStep) -> None:
        config = self.scheduler.config
        assert step.rows
        assert step.num_tokens == sum(row.num_tokens for row in step.rows)
        assert 1 <= step.num_tokens <= config.max_num_batched_tokens
        assert len({row.request for row in step.rows}) == len(step.rows)
        assert len(step.rows) <= self.scheduler.num_running <= config.max_num_seqs
        for row in step.rows:
            request, end = row.request, row.start + row.num_tokens
            known = request.num_tokens_with_inflight - row.samples
            assert row.num_tokens >= 1
            assert request.num_computed_tokens == end <= known
            assert row.samples == (end == known and request.max_tokens > 0)
            if row.admitted:
                self.admitted.append(request)
                self.hits.setdefault(request, []).append(row.start)
            self.computed[request] = self.computed.get(request, 0) + row.num_tokens
        admitted = [row.admitted for row in step.rows]
        assert admitted == sorted(admitted), "running requests come first"
        if any(admitted):
            served = {row.request for row in step.rows}
            for request in self.scheduler.running:
                has_work = request.num_computed_tokens < request.num_tokens_with_inflight
                if has_work and not request.end_is_in_flight(config.max_model_len):
                    assert request in served, "it lost its turn to one that waited"

    def _run_row(self, row: ScheduledRow) -> int:
        request, start, end = row.request, row.start, row.start + row.num_tokens
        config = self.scheduler.config
        size, value = config.block_size, rope_seed(config, request.rope_length)
        if start:
            value = self._read_before(request, start)
        for position in range(start, end):
            if position < request.num_tokens:
                token = request.token_ids[position]
            else:  # still in flight: the device takes it from the slot
                token = self.last_by_slot[request.slot]
            value = fold(value, token)
            for group, table in enumerate(request.tables):
                assert table[position // size] != 0
                slots = self.store.setdefault(table[position // size], [-1] * size)
                slots[position % size] = value + group
        if row.samples:
            self.last_by_slot[request.slot] = draw(value)
            return draw(value)
        return -1

    def _read_before(self, request: Request, start: int) -> int:
        size = self.scheduler.config.block_size
        for group, window in enumerate(self.scheduler.config.windows):
            if window != 1:  # with a window of 1 a token sees only itself
                block = request.tables[group][(start - 1) // size]
                return self.store[block][(start - 1) % size] - group
        raise AssertionError("give one group a window of more than one token")

    def _check_all_that_it_sees(self, row: ScheduledRow) -> None:
        """Attention reads all positions in its window, not only the last one."""
        request, config = row.request, self.scheduler.config
        values, size = self._expected_values(request), config.block_size
        known = min(row.start + row.num_tokens, len(values))
        for group, window in enumerate(config.windows):
            first = 0 if window is None else max(0, row.start - window + 1)
            for index in range(first // size, -(-known // size)):
                low = max(first, index * size)
                high = max(low, min(known, (index + 1) * size))
                stored = self.store[request.tables[group][index]][low % size :][: high - low]
                expected = [value + group for value in values[low:high]]
                assert stored == expected, f"{request!r}: group {group}, positions {low}..{high}"

    def _expected_values(self, request: Request) -> list[int]:
        """The value at each position whose token is known."""
        seed = rope_seed(self.scheduler.config, request.rope_length)
        values = self.values.setdefault((request, seed), [])
        for token in request.token_ids[len(values) :]:
            values.append(fold(values[-1] if values else seed, token))
        return values
