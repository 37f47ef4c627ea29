"""A device without a device: a KV store of ints behind the scheduler, and what it must produce.

The value stored at a position folds in the value before it, *as read through a block table*, and
the token; the first one starts from the regime of the rotary frequencies. So a block that is stale,
misplaced, of another group of layers or regime, not written yet, or written by a neighbour that has
a share in it, changes every later token, and a request that read anything wrong cannot give the
expected output. Besides, every position that a row sees in any group is checked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from jaxpaged.core.groups import Group
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


def small_config(**changes: object) -> SchedulerConfig:
    """A pool in which to check every block at every step costs little."""
    return make_config(**{"num_blocks": 100, **changes})


def make_request(name: str, prompt: Iterable[int], max_tokens: int = 8, **more: object) -> Request:
    more.setdefault("arrival_time", 0.0)
    return Request(name, list(prompt), max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def make_samples(
    name: str, prompt: Sequence[int], count: int, max_tokens: int = 8, **more: object
) -> list[Request]:
    """Requests for `count` samples of one prompt."""
    return [
        make_request(f"{name}{index}", prompt, max_tokens, payload=index, **more)
        for index in range(count)
    ]


def fold(value: int, token: int) -> int:
    mixed = (value ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ (mixed >> 29)


def draw(value: int, index: int = 0) -> int:
    """The token that sample `index` draws; now and then all samples draw the same."""
    if index and (value >> 20) % 4:
        value = fold(value, 1000 + index)
    return (value >> 33) % VOCAB


def sample_index(request: Request) -> int:
    return request.payload if isinstance(request.payload, int) else 0


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
    index = sample_index(request)
    outputs: list[int] = []
    while len(outputs) < request.max_tokens and len(tokens) < config.max_model_len:
        token = draw(value, index)
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


class Search:
    """A beam search whose choices follow from nothing but the values at the ends of its beams.

    Each beam proposes some tokens; the `width` best of all go on. Every `ending`-th token ends a
    sequence, which then is no beam any more (0: none does).
    """

    def __init__(self, width: int, num_steps: int, *, ending: int = 0, even: bool = False) -> None:
        self.width = width
        self.num_steps = num_steps
        self.ending = ending
        self.even = even
        """No beam dies and none is forked, once there are `width`."""
        self.scores = [0]
        self.history: list[list[tuple[int, int]]] = []
        """The continuations that each step led to: (index of the beam, token)."""
        self.members: list[Request] = []
        self.values: dict[Request, tuple[int, int]] = {}
        """Beam -> its epoch when its value came, and the value."""

    def advance(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """The beams that follow on those with these values; none when the search is over."""
        assert len(values) == len(self.scores) <= self.width
        if len(self.history) + 1 == self.num_steps:
            self.history.append([])
            return []
        candidates: list[tuple[int, int, int]] = []
        for index, (value, score) in enumerate(zip(values, self.scores, strict=True)):
            many = 1 if self.even and len(values) == self.width else 2 * self.width
            for token in {draw(fold(value, 2000 + number)) for number in range(many)}:
                if not self.ending or token % self.ending:
                    candidates.append((score - fold(value, token) % 1000, index, token))
        best = sorted(candidates)[: self.width]
        self.scores = [score for score, _, _ in best]
        self.history.append([(index, token) for _, index, token in best])
        return self.history[-1]


def expected_search(
    search: Search, prompt: Sequence[int], config: SchedulerConfig
) -> list[list[tuple[int, int]]]:
    """The history of the same search over plain lists of tokens."""
    plain = Search(search.width, search.num_steps, ending=search.ending, even=search.even)
    beams = [list(prompt)]
    while beams:
        assert len({len(beam) for beam in beams}) == 1
        length = len(prompt) if config.rope_rule == "dynamic" else len(beams[0])
        seed = rope_seed(config, length)
        follow = plain.advance([value_of(beam, seed) for beam in beams])
        beams = [[*beams[index], token] for index, token in follow]
    return plain.history


class Sim:
    """Drives a scheduler with at most `depth` steps in flight and checks every step."""

    def __init__(self, config: SchedulerConfig, *, depth: int = 2, check: bool = True) -> None:
        self.scheduler = Scheduler(config)
        self.scheduler.kv.begin_plan = self._begin_plan  # type: ignore[method-assign]
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
        self.searches: dict[Group, Search] = {}
        self.before: dict[Request, int] = {}
        """What ran before the newest plan -> length of its tables."""
        self.with_row: set[Request] = set()
        """What runs and has had a row since its admission."""
        self.sharers: Counter[int] = Counter()
        """Last block that was shared before the newest plan -> how many held it."""

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        self.delivered[request] = []
        return request

    def add_group(self, requests: Sequence[Request]) -> list[Request]:
        self.scheduler.add_group(requests)
        self.requests += requests
        self.delivered.update((request, []) for request in requests)
        return list(requests)

    def add_beams(
        self, name: str, prompt: Sequence[int], width: int, max_tokens: int = 8, **more: object
    ) -> Search:
        """A search in which `ending` and `even` are as for `Search`."""
        script = {key: more.pop(key) for key in ("ending", "even") if key in more}
        beams = make_samples(name, prompt, width, max_tokens, **more)
        self.scheduler.add_beams(beams)
        room = self.scheduler.config.max_model_len - len(prompt)
        search = Search(width, min(max_tokens, room), **script)  # type: ignore[arg-type]
        search.members = beams
        assert beams[0].group is not None
        self.searches[beams[0].group] = search
        return search

    def _begin_plan(self) -> None:
        type(self.scheduler.kv).begin_plan(self.scheduler.kv)
        running = list(self.scheduler.running)
        self.before = {request: request.num_blocks for request in running}
        self.with_row &= self.before.keys()
        sharing = [request for request in running if request.shares_tail]
        self.sharers = Counter(table[-1] for request in sharing for table in request.tables)

    def launch(self) -> ScheduledStep | None:
        """Plan a step and run it on the fake device; its tokens wait in `queue`."""
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step)
            self._check_writes(step)
            self._check_copies(step)
            self.queue.append((step, self._run_step(step)))
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
        values = {row.request: token for row, token in zip(step.rows, tokens, strict=True)}
        for request in [result.request for result in results if result.request.is_beam]:
            self._advance(request, values[request])
        if self.check:
            self.scheduler.check_integrity()
        return results

    def _advance(self, beam: Request, value: int) -> None:
        """A beam's value has come; if it was the last one, the search goes on or ends."""
        group = beam.group
        assert group is not None
        search = self.searches[group]
        search.values[beam] = beam.epoch, value
        # Values from before a preemption come again.
        values = [
            value
            for b in group.live
            for e, value in [search.values.get(b, (-1, 0))]
            if e == b.epoch
        ]
        if len(values) < len(group.live):
            return
        search.values.clear()
        parents = [parent.token_ids.copy() for parent in group.live]
        follow = search.advance(values)
        if not follow:
            self.scheduler.finish(beam, "length")
            return
        self.scheduler.advance_beams(group, follow)
        beams = [live.token_ids for live in group.live]
        assert beams == [[*parents[index], token] for index, token in follow]

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
        for search in self.searches.values():
            assert all(beam.is_finished for beam in search.members)
            last = search.members[0]
            assert {beam.finish_reason for beam in search.members} == {last.finish_reason}
            expected = expected_search(search, last.prompt_token_ids, self.scheduler.config)
            if last.finish_reason == "length":
                assert search.history == expected
            else:
                assert search.history == expected[: len(search.history)]
                assert last.finish_reason == "abort" or allow_failed, last.error
        self.assert_drained()

    def assert_drained(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
        beams = [beam for search in self.searches.values() for beam in search.members]
        assert not any(any(r.tables) or r.slot != -1 for r in [*self.requests, *beams])

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
            if row.num_tokens == 0:
                source = step.rows[row.source]
                assert request.num_output_tokens == 0
                assert source.request.prompt_token_ids == request.prompt_token_ids
                assert source.request.cache_salt == request.cache_salt
                assert source.start + source.num_tokens == end == request.num_prompt_tokens
            else:
                assert (row.num_tokens >= 1, row.source) == (True, -1)
            assert request.num_computed_tokens == end <= known
            assert row.samples == (end == known and request.max_tokens > 0)
            assert row.admitted == (request not in self.with_row)
            self.with_row.add(request)
            if row.admitted:
                self.admitted.append(request)
                self.hits.setdefault(request, []).append(row.start)
            self.computed[request] = self.computed.get(request, 0) + row.num_tokens
        # A sample forked just now has run as long as the one that computed the prompt.
        admitted = [row.request not in self.before for row in step.rows]
        assert admitted == sorted(admitted), "running requests come first"
        if any(admitted):
            served = {row.request for row in step.rows}
            for request in self.scheduler.running:
                has_work = request.num_computed_tokens < request.num_tokens_with_inflight
                waits = request.awaits_fork or (request.is_beam and request.num_inflight)
                # Members of a group that resumes have been forked in this very step.
                waits = waits or not self.before.get(request) or self._is_computed(request, step)
                if has_work and not waits and not request.end_is_in_flight(config.max_model_len):
                    assert request in served, "it lost its turn to one that waited"

    def _is_computed(self, request: Request, step: ScheduledStep) -> bool:
        """Whether a row of this step begins with a block that is yet to come for the request."""
        size = self.scheduler.config.block_size
        first = request.num_computed_tokens // size
        for index in {row.start // size for row in step.rows if row.start // size >= first}:
            names = {tuple(row.request.block_hashes[index : index + 1]) for row in step.rows}
            if tuple(request.block_hashes[index : index + 1]) in names - {()}:
                return True
        return False

    def _check_writes(self, step: ScheduledStep) -> None:
        """No row writes a block in another one's table, unless that came by it in this very plan
        and takes all that is written there as its own: by a hit, or by a fork.
        """
        pool, size = self.scheduler.kv.pool, self.scheduler.config.block_size
        for row in step.rows:
            end = row.start + row.num_tokens
            for index in range(row.start // size, -(-end // size) if row.num_tokens else 0):
                for group, table in enumerate(row.request.tables):
                    refs = pool.ref_count(table[index])
                    others = [] if refs == 1 else self._others_with(row.request, group, index)
                    assert refs == 1 + len(others)
                    for other in others:
                        assert index >= self.before.get(other, 0), f"{other!r} had it already"
                        assert other.num_computed_tokens >= min(end, (index + 1) * size)

    def _others_with(self, request: Request, group: int, index: int) -> list[Request]:
        """Running requests that share the block at this index of a request's table."""
        block = request.tables[group][index]
        others = [r for r in self.scheduler.running if r is not request and index < r.num_blocks]
        return [other for other in others if other.tables[group][index] == block]

    def _check_copies(self, step: ScheduledStep) -> None:
        """Copies go to blocks that one row alone holds and writes; and of those who share a last
        block, one at least keeps it.
        """
        if not step.copies:
            return
        pool, size = self.scheduler.kv.pool, self.scheduler.config.block_size
        sources = {target: source for source, target in step.copies}
        targets: list[int] = []
        assert len(sources) == len(step.copies), "a block is the destination of two copies"
        parted: Counter[int] = Counter()
        for row in step.rows:
            index = row.start // size
            for group, table in enumerate(row.request.tables if row.num_tokens else ()):
                target = table[index]
                if target in sources:
                    # Forks made when this very row was planned may hold it, too.
                    others = self._others_with(row.request, group, index)
                    assert pool.ref_count(target) == 1 + len(others)
                    assert not any(self.before.get(other) for other in others)
                    targets.append(target)
                    if self.before.get(row.request):
                        parted[sources[target]] += 1
        assert sorted(targets) == sorted(sources), "a copy that nobody needs"
        assert 0 not in sources
        assert 0 not in sources.values()
        for source, count in parted.items():
            assert count < self.sharers[source], "all of them left a shared block"

    def _run_step(self, step: ScheduledStep) -> list[int]:
        """Copy and compute; a token for each row, or for a beam the value that it ends with."""
        contents = [self.store[source].copy() for source, _ in step.copies]
        for (_, target), content in zip(step.copies, contents, strict=True):
            self.store[target] = content
        values: list[int] = []
        for row in step.rows:
            values.append(values[row.source] if row.source >= 0 else self._run_row(row))
        drawn = []
        for row, value in zip(step.rows, values, strict=True):
            token = draw(value, sample_index(row.request)) if row.samples else -1
            if row.samples and not row.request.is_beam:
                self.last_by_slot[row.request.slot] = token
            drawn.append(value if row.request.is_beam else token)
        return drawn

    def _run_row(self, row: ScheduledRow) -> int:
        """Write the row's positions; the value at the last of them."""
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
        return value

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
            blocks = request.tables[group][first // size : -(-known // size)]
            stored = list(chain.from_iterable(self.store[block] for block in blocks))
            skipped = first // size * size
            stored = stored[first - skipped : max(first, known) - skipped]
            expected = (
                [value + group for value in values[first:known]] if group else values[first:known]
            )
            assert stored == expected, f"{request!r}: group {group}, positions {first}..{known}"

    def _expected_values(self, request: Request) -> list[int]:
        """The value at each position whose token is known."""
        seed = rope_seed(self.scheduler.config, request.rope_length)
        values = self.values.setdefault((request, seed), [])
        if request.is_beam:  # one that was dead may have taken over another one's tokens
            values.clear()
        for token in request.token_ids[len(values) :]:
            values.append(fold(values[-1] if values else seed, token))
        return values
