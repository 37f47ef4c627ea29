"""Requests that share their KV by forks: the n samples of a prompt, or the beams of a search.

A group is admitted, set back and resumed as one, since its members hold the same blocks. What they
have in common is computed once, by its leader; then the others take the leader's blocks by
reference (PagedAttention, arXiv 2309.06180, section 4.4) and write to copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.core.request import Request


class Group:
    """Members of one request. Only the scheduler changes it.

    The samples of a prompt are all live until they end. Of the beams of a search, which are as many
    as it is wide, only some are live: the first one alone before the search has begun, and fewer
    than all where there are fewer continuations. The others keep their slots.
    """

    __slots__ = ("fork_at", "is_beams", "leader", "live", "members")

    def __init__(self, members: Sequence[Request], *, is_beams: bool = False) -> None:
        self.is_beams = is_beams
        self.members = list(members)
        """All that have not ended, in the order of their indices."""
        self.live = self.members[:1] if is_beams else list(self.members)
        """Those with tokens of their own; beams in the order of the search."""
        self.leader: Request | None = None
        """Who computes what all will share; None while the group waits, and after the fork."""
        self.fork_at = 0
        """Tokens that are computed once."""
        for member in self.members:
            member.group = self

    @property
    def is_fresh(self) -> bool:
        """True before the first token: all members draw it from the same logits."""
        return self.live[0].num_output_tokens == 0

    def set_fork_point(self) -> None:
        """Choose what is computed once: the prompt, or after a preemption all that the live members
        have in common. Each keeps at least one token to compute, whose logits are its own.
        """
        first = self.live[0]
        if self.is_fresh:
            self.fork_at = first.num_tokens
        else:
            rest = [member.token_ids for member in self.live[1:]]
            end = min(member.num_tokens for member in self.live) - 1
            for other in rest:
                end = common_length(first.token_ids, other, end)
            self.fork_at = end

    def followers(self) -> list[Request]:
        """Live members that wait for the leader."""
        return [member for member in self.live if member.awaits_fork]

    def leave(self, member: Request) -> None:
        """The member goes on alone, or has ended. A last one needs no group."""
        self.members.remove(member)
        if member in self.live:
            self.live.remove(member)
        member.group = None
        if len(self.members) == 1 and not self.is_beams:
            last = self.members.pop()
            self.live.clear()
            last.group = None

    def dissolve(self) -> None:
        """Every member goes on alone."""
        for member in self.members:
            member.group = None
        self.members.clear()
        self.live.clear()
        self.leader = None

    def split(self, count: int) -> None:
        """Keep the first `count` samples; the rest, which must wait too, is a group of its own."""
        rest = self.members[count:]
        for member in rest:
            self.leave(member)
        if len(rest) > 1:
            Group(rest)


def make_groups(members: Sequence[Request], most: int) -> None:
    """Group samples of one prompt, at most so many together."""
    for start in range(0, len(members), most):
        part = members[start : start + most]
        if len(part) > 1:
            Group(part)


def common_length(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """How many tokens, at most so many, two sequences begin with in common."""
    if a[:most] == b[:most]:
        return most
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
