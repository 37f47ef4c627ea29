"""Plans one step: which requests compute how many tokens in it, with which blocks.

There are no phases. A request has known tokens and computed tokens, and every step computes some
more of the difference; a step mixes decode rows with chunks of prompts.
"""

from __future__ import annotations

from jaxpaged.core.groups import Group, branches, lead
from jaxpaged.core.plan import ScheduledRow, ScheduledStep
from jaxpaged.core.refusals import outgrown_text
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.rope import enter_regime, must_restart
from jaxpaged.core.steady import steady_until
from jaxpaged.core.waves import Waves


class Planner(Waves):
    """Running requests go first, in the order of their admission, and waiting ones after them."""

    def _plan(self) -> ScheduledStep | None:
        self.kv.begin_plan()
        self._ends.clear()
        preempted = self._restart_crossing() if self.config.rope_rule == "longrope" else []
        rows, budget = self._plan_running(preempted)
        self._commit_running(rows)
        if not preempted:
            budget = self._admit(rows, budget)
        copies = self.kv.take_copies()
        if not rows:
            return None
        step = ScheduledStep(
            step_id=self._next_step_id,
            rows=rows,
            num_tokens=self.config.max_num_batched_tokens - budget,
            preempted=preempted,
            copies=copies,
        )
        self.stats.record_copies(copies)
        self._next_step_id += 1
        self._in_flight[step.step_id] = step
        self._record(step)
        return step

    def _plan_running(self, preempted: list[Request]) -> tuple[list[ScheduledRow], int]:
        """Rows of requests that run already, in the order of admission, and the budget left."""
        budget = self.config.max_num_batched_tokens
        begun: set[bytes] = set()
        max_model_len, allocate_slots = self.config.max_model_len, self.kv.allocate_slots
        windowed = self.kv.has_windows
        # Nothing is committed until the pass is over, since a later request may preempt an
        # earlier one (by priority) whose row then goes as if it had never been.
        rows: list[ScheduledRow] = []
        for request in list(self._running):
            if budget == 0:
                break
            start = request.num_computed_tokens
            if start < request.steady_until:  # nearly all decode rows
                rows.append(ScheduledRow(request, request.epoch, start, 1, True, False))
                budget -= 1
                continue
            if request.status is not RequestStatus.RUNNING:  # preempted in this very loop
                continue
            count = len(request.token_ids) + request.num_inflight - start
            if count == 0 or (request.num_inflight and request.end_is_in_flight(max_model_len)):
                continue
            group = request.group
            if group is not None:
                if request.awaits_fork or (group.is_beams and request.num_inflight):
                    continue
                if request.fork_at:
                    count = min(count, request.fork_at - start)
            if count > 1:
                if not self._catch_up(request, begun):
                    continue
                count -= request.num_computed_tokens - start
                start = request.num_computed_tokens
                count = self._chunk(start, count, budget)
            # Most decode rows: the last block has room, and it is the request's own.
            fits = start + count <= request.capacity and not (windowed or request.shares_tail)
            while not (fits or allocate_slots(request, count)):
                if self.kv.trim_all(self._running):
                    continue
                victims = self._choose_victims()
                for victim in victims:
                    self._preempt(victim)
                preempted += victims
                budget += sum(row.num_tokens for row in rows if row.request in victims)
                rows = [row for row in rows if row.request not in victims]
                if request.status is not RequestStatus.RUNNING:
                    break
            else:
                rows.append(self._row(request, start, count))
                budget -= count
        return rows, budget

    def _admit(self, rows: list[ScheduledRow], budget: int) -> int:
        """Append rows of waiting requests while they fit; returns the budget left.

        The first that does not fit ends the search: nobody overtakes.
        """
        config, kv = self.config, self.kv
        if not budget or not len(self._waiting) or not self._free_slots:
            return budget
        promised, watermark = self._promised_blocks(), config.watermark_blocks
        while budget > 0 and self._free_slots:
            head = self._waiting.peek()
            if head is None or not self._is_ready(head):
                break
            group = head.group
            request = head if group is None else group.live[0]
            needed = self._blocks_needed(request)
            if group is not None and group.is_stuck:
                needed = max(needed, kv.pool.num_usable + 1)
            if needed > kv.pool.num_usable:
                self._fail(request, outgrown_text(request, config, needed))
                continue
            headroom = watermark + promised if self._running else 0
            if kv.pool.num_free <= headroom:  # saves the look-up: a block is always needed
                break
            members = [request] if group is None else group.members
            twin = self._twin(request)
            if twin >= 0:
                parting = len(members) * len(config.windows)  # each takes a block of its own next
                if kv.pool.num_free < headroom + parting:
                    break
                self._start(request, request.num_tokens, request.num_tokens)
                request.fork_at = 0
                for member in members:
                    self._join(rows, twin, self._row(member, member.num_tokens, 0))
                promised += parting
                continue
            target = request.num_tokens
            if group is not None:
                # What the other members will hold, on top of what their leader does.
                headroom += needed - kv.blocks_of_tree([(request.num_tokens, 0)])
                target = group.common
            taken = self._take_blocks(request, target, budget, headroom)
            if taken is None:
                break
            num_hit, count = taken
            self._start(request, num_hit, target)
            rows.append(self._row(request, num_hit, count))
            self._commit(rows, len(rows) - 1)
            budget -= count
            promised += sum([self._blocks_to_come(member) for member in members])
            promised += kv.copies_to_come(members)
        return budget

    def _take_blocks(
        self, request: Request, target: int, budget: int, headroom: int
    ) -> tuple[int, int] | None:
        """Cached and new blocks for a waiting request that is to compute its first `target` tokens,
        at most `budget` now. Returns how many it need not compute and how many it computes in this
        step; None, with nothing changed, if there is no room for it.
        """
        kv = self.kv
        hits, num_hit = kv.get_computed_blocks(request, target)
        tail = kv.get_tail(request, num_hit, target)
        # To copy a block takes one more for a moment, which a small pool may not have.
        for tail_hit in (None,) if tail is None else (tail, None):
            start = num_hit + (tail_hit.num_tokens if tail_hit else 0)
            count = target - start
            if self.config.enable_chunked_prefill:
                count = self._chunk(start, count, budget)
            elif count > budget:
                return None
            if kv.allocate_slots(
                request,
                count,
                hit_tables=hits,
                tail=tail_hit,
                reserve_full=True,
                headroom=headroom,
            ):
                return start, count
        return None

    def _is_ready(self, request: Request) -> bool:
        """Whether the head of the queue can be looked at: its group, if it has one, is made to fit,
        and no token of it is in flight.
        """
        config, group = self.config, request.group
        members = [request] if group is None else group.live
        # One that was preempted with a token in flight needs that token first.
        if any(member.num_inflight for member in members):
            return False
        if config.rope_rule == "longrope" and request.num_output_tokens:
            for member in members:
                enter_regime(member, config.rope_rule, config.rope_threshold)
                self.kv.extend_hashes(member)
        if group is None:
            return True
        if len({member.rope_regime for member in members}) > 1:
            group.dissolve()  # equal tokens, but not equal keys
            return True
        if not group.is_beams:
            self._fit_group(group)
        return request.group is None or len(self._free_slots) >= len(group.members)

    def _fit_group(self, group: Group) -> None:
        """Part a waiting group of samples that needs more than the whole pool."""
        count, room = len(group.members), self.kv.pool.num_usable
        common = group.common
        sizes = [self.kv.blocks_of_branch(member, common) for member in group.members]
        sizes[0] = self.kv.blocks_of_branch(group.members[0], 0)
        while count > 1 and sum(sizes[:count]) > room:
            count -= 1
        if count < len(group.members):
            group.split(count)

    def _blocks_needed(self, request: Request) -> int:
        """Blocks of all known tokens of a waiting request and its group; before the first token of
        a group also those of that token, with which its members part.
        """
        group = request.group
        if group is None:
            return self.config.blocks_for_sequence(request.num_tokens)
        if not group.is_fresh:
            return self.kv.blocks_of_tree(group.shared_lengths)
        shared, others = request.num_tokens, len(group.members) - 1
        return self.kv.blocks_of_tree([(shared + 1, 0), *[(shared + 1, shared)] * others])

    def _promised_blocks(self) -> int:
        """Blocks that running requests still need for tokens known already. They were admitted
        because these blocks were free, so a later admission must not take them."""
        known = sum(
            self._blocks_to_come(r) for r in self._running if r.num_computed_tokens < r.num_tokens
        )
        return known + self.kv.copies_to_come(self._running)

    def _blocks_to_come(self, request: Request) -> int:
        if not request.awaits_fork:
            return self.kv.blocks_to_come(request)
        if request.leader is not None:
            return self.kv.blocks_of_branch(request, request.leader.fork_at)
        return 0  # a beam that has not begun

    def _row(self, request: Request, start: int, count: int) -> ScheduledRow:
        reaches_end = start + count == len(request.token_ids) + request.num_inflight
        samples = reaches_end and request.max_tokens != 0
        admitted, request.slot_is_new = request.slot_is_new, False
        return ScheduledRow(request, request.epoch, start, count, samples, admitted)

    def _commit_running(self, rows: list[ScheduledRow]) -> None:
        """`_commit` each row; of that steady ones need next to nothing."""
        for index, row in enumerate(rows.copy()):
            request = row.request
            if row.start < request.steady_until:
                request.num_computed_tokens += 1
                request.num_inflight += 1
            else:
                self._commit(rows, index)
                request.steady_until = steady_until(request, self.kv, self.config.max_model_len)

    def _commit(self, rows: list[ScheduledRow], index: int) -> None:
        """Take a row as computed, so that the next step can be planned on top of it. Where it
        completes what a group shares, the group is forked, and rows may be appended.
        """
        row = rows[index]
        request, end = row.request, row.start + row.num_tokens
        request.num_computed_tokens = end
        if row.samples:
            request.num_inflight += 1
        if end >= (request.num_registered_blocks + 1) * self.config.block_size:
            self.kv.register(request)
        if row.start < request.num_prompt_tokens or row.start < request.recompute_until:
            first_time = max(row.start, request.recompute_until)
            self.stats.recomputed_tokens += min(end, first_time) - row.start
            self.stats.prompt_tokens += max(0, min(end, request.num_prompt_tokens) - first_time)
            if row.start < request.num_prompt_tokens <= end:
                self.kv.register_tail(request)
                if row.samples and end == request.num_prompt_tokens:
                    self._note_end(request, index)
        if request.fork_at == end and request.group is not None:
            self._fork_group(rows, index, request.group)

    def _fork_group(self, rows: list[ScheduledRow], index: int, group: Group) -> None:
        """A row has computed what others wait for. Before the first token all draw it from the same
        logits; else they part by their next one, and of those that go the same way one leads on.
        """
        leader = rows[index].request
        followers, end = group.followers(leader), leader.fork_at
        leader.fork_at = 0
        if group.is_fresh:
            for member in followers:
                self._fork(leader, member)
                row = self._row(member, end, 0)
                row.source = index
                member.num_inflight += row.samples
                rows.append(row)
            return
        for branch in branches([leader, *followers], end):
            head = branch[0]
            lead(branch)
            if head is not leader:
                self._branch_off(leader, head)

    def _branch_off(self, leader: Request, member: Request) -> None:
        """A member that resumes goes its own way. It may find more than the leader's in the cache,
        but must not get beyond the point where others wait for it.
        """
        hits, num_hit = self.kv.get_computed_blocks(member, member.fork_at or None)
        if num_hit > leader.num_computed_tokens:
            member.awaits_fork, member.leader = False, None
            self.kv.share(leader, member, hits, num_hit)
        else:
            self._fork(leader, member)

    def _start(self, request: Request, num_hit: int, target: int) -> None:
        """Take the head of the queue, and with it its whole group, out of it. `num_hit` of the
        `target` tokens that were looked up are in the cache.
        """
        resumed = request.status is RequestStatus.PREEMPTED
        group = request.group
        for member in [request] if group is None else group.members:
            head = self._waiting.peek()  # drops ended ones from the front
            assert head is member, "the members of a group wait one behind the other"
            self._waiting.pop()
            member.status = RequestStatus.RUNNING
            member.slot = self._free_slots.pop()
            member.slot_is_new = True
            member.awaits_fork = member is not request
            self._running[member] = None
            if not resumed:
                member.admission_order = self._num_admitted
                self._num_admitted += 1
        request.num_computed_tokens = request.num_hit_tokens = num_hit
        if group is not None:
            lead(group.live)
        if self.config.enable_prefix_caching and not request.skip_prefix_cache:
            self.stats.record_lookup(target, num_hit, resumed=resumed)
        if not resumed:
            request.num_cached_tokens = num_hit

    def _record(self, step: ScheduledStep) -> None:
        # Only a request's own last blocks, one in each group of layers, have empty slots, as shared
        # blocks are full but for the last one of a group that has just been forked; so no walk over
        # blocks is needed to count a shared one once. What a window has left behind in a block that
        # it still needs is a token all the same.
        block_size, held = self.config.block_size, self.kv.pool.num_held
        empty = sum([r.capacity - r.num_computed_tokens for r in self._running])
        sharers = [r for r in self._running if r.shares_tail]
        if sharers:
            once = {r.tables[0][-1]: r.capacity - r.num_computed_tokens for r in sharers}
            empty += sum(once.values()) - sum(r.capacity - r.num_computed_tokens for r in sharers)
        self.stats.record_step(
            running=len(self._running),
            tokens=step.num_tokens,
            blocks=held,
            waste=empty * len(self.config.windows) / (held * block_size),
        )

    def _restart_crossing(self) -> list[Request]:
        """Set back the running requests that the next row takes beyond the rope threshold: the KV
        that they have is of no use there. They come back, in the order that they had, with all
        their tokens known and so in the long regime, which nobody leaves."""
        threshold, max_model_len = self.config.rope_threshold, self.config.max_model_len
        crossing = []
        for request in self._running:
            # The beams of a search cross together, and those that have not begun go with them; not
            # before it has gone on, as what is in flight would be lost and computed for ever.
            moving = request
            if request.is_beam:
                assert request.group is not None
                moving = request.group.live[0]
                if moving.num_inflight:
                    continue
            if must_restart(moving, threshold, max_model_len):
                crossing.append(request)
        for request in reversed(crossing):
            if request.group is not None and not request.is_beam:
                self._leave_group(request, request.group)  # the others may stay for long
            self._set_back(request)
        self.stats.rope_restarts += len(crossing)
        return crossing
