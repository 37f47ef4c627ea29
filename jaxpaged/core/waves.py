"""Requests that begin alike and run together: what they share is computed once.

Most of it is found in the prefix cache, even by a request of the same step, as blocks are findable
from the moment on that a step which fills them is planned. Two things are not, and are done here.
"""

from __future__ import annotations

from jaxpaged.core.plan import ScheduledRow, SchedulerConfig
from jaxpaged.core.queues import Queues
from jaxpaged.core.request import Request


class Waves(Queues):
    """Prompts that are computed in chunks side by side, and prompts that are equal to the end."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ends: dict[bytes, int] = {}
        """Name of a whole prompt -> the row of the step being planned that computes its end."""

    # ---------------------------------------------------------------- chunks side by side

    def _chunk(self, start: int, count: int, budget: int) -> int:
        """How many of the `count` tokens from `start` on one step computes.

        What the threshold cuts ends with a block: whoever goes on from there can use all of it.
        """
        cap = self.config.long_prefill_token_threshold
        if cap and count > cap:
            whole = (start + cap) // self.config.block_size * self.config.block_size - start
            count = whole if whole > 0 else cap
        return min(count, budget)

    def _catch_up(self, request: Request, begun: set[bytes]) -> bool:
        """Let a running request skip what others have computed of its tokens since its last chunk.

        False if a row of this step already computes the block that comes next for it: then it has
        its turn when that block can be found. `begun` collects the names of these blocks.
        """
        kv, size = self.kv, self.config.block_size
        target, computed = request.fork_at or request.num_tokens, request.num_computed_tokens
        last, index = (target - 1) // size, computed // size  # the last one is always computed
        if not kv.enable_caching or request.skip_prefix_cache or index >= last:
            return True
        hits: list[list[int]] = []
        num_hit = computed
        if kv.has_windows or kv.pool.get_cached(request.block_hashes[index]) is not None:
            hits, num_hit = kv.get_computed_blocks(request, target)
            index = max(num_hit, computed) // size
        if index < last:
            name = request.block_hashes[index]
            if name in begun:
                return False
            begun.add(name)
        if num_hit > computed:
            kv.share(request, request, hits, num_hit)
            if not request.num_preemptions:
                self.stats.prefix_hit_tokens += num_hit - computed
                request.num_cached_tokens += num_hit - computed
        return True

    # ---------------------------------------------------------------- equal prompts

    def _note_end(self, request: Request, index: int) -> None:
        """Row `index` computes the end of the request's prompt and draws from it."""
        name = _whole_name(request)
        if name is not None:
            self._ends.setdefault(name, index)

    def _twin(self, request: Request) -> int:
        """The row of this step that computes to its end the very prompt of a waiting request; -1 if
        there is none.
        """
        fresh = request.num_output_tokens == 0 and not request.only_scores
        if not self._ends or not fresh or request.skip_prefix_cache or request.is_beam:
            return -1
        return self._ends.get(_whole_name(request) or b"", -1)

    def _join(self, rows: list[ScheduledRow], source: int, row: ScheduledRow) -> None:
        """Append the row, which computes nothing, of a request that holds nothing yet: it draws its
        first token from the logits of another row, like a sample of the same group.
        """
        self._fork(rows[source].request, row.request)
        row.source = source
        row.request.num_inflight += 1
        rows.append(row)


def _whole_name(request: Request) -> bytes | None:
    """Of all tokens of the prompt; None without caching."""
    if request.tail_hash is not None:
        return request.tail_hash
    full = len(request.block_hashes)
    return request.block_hashes[-1] if full and request.num_output_tokens == 0 else None
