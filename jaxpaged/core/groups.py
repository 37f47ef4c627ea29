"""Requests that share their KV by forks: the n samples of a prompt, or the beams of a search.

A group is admitted, set back and resumed as one, since its members hold the same blocks. What they
have in common is computed once, by one that leads; then the others take its blocks by reference
(PagedAttention, arXiv 2309.06180, section 4.4) and write to copies. Members that resume form a
tree: where they part, those that still go the same way follow one of them, and so on.
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

    __slots__ = (
        "_common",
        "_compared",
        "_shared",
        "is_beams",
        "is_stuck",
        "live",
        "lone_length",
        "members",
    )

    def __init__(self, members: Sequence[Request], *, is_beams: bool = False) -> None:
        self.is_beams = is_beams
        self.members = list(members)
        """All that have not ended, in the order of their indices."""
        self.live = self.members[:1] if is_beams else list(self.members)
        """Those with tokens of their own; beams in the order of the search."""
        self.lone_length = -1
        """Tokens of each beam when the search last ran out of blocks with nobody beside it."""
        self.is_stuck = False
        """It has run out of them twice at the same length."""
        self._compared: list[tuple[Request, int]] = []
        """Live members and their tokens when they were compared last. As tokens are only added,
        equal ones need not be compared again: a group that waits is looked at in every step."""
        self._common: int | None = None
        self._shared: list[tuple[int, int]] | None = None
        for member in self.members:
            member.group = self

    @property
    def is_fresh(self) -> bool:
        """True before the first token: all members draw it from the same logits."""
        return self.live[0].num_output_tokens == 0

    @property
    def common(self) -> int:
        """Tokens that all live members begin with and that are computed once."""
        self._look()
        if self._common is None:
            self._common = common_start(self.live)
        return self._common

    @property
    def shared_lengths(self) -> list[tuple[int, int]]:
        """See the function of that name."""
        self._look()
        if self._shared is None:
            self._shared = shared_lengths(self.live)
        return self._shared

    def _look(self) -> None:
        """Forget what was found if anything has changed since."""
        now = [(member, member.num_tokens) for member in self.live]
        if now != self._compared:
            self._compared = now
            self._common = self._shared = None

    def followers(self, leader: Request) -> list[Request]:
        """Members that wait for this one."""
        return [member for member in self.live if member.leader is leader]

    def leave(self, member: Request) -> None:
        """The member goes on alone, or has ended. A last one needs no group."""
        self.members.remove(member)
        if member in self.live:
            self.live.remove(member)
        member.group = None
        self._compared.clear()
        if len(self.members) == 1 and not self.is_beams:
            last = self.members.pop()
            self.live.clear()
            last.group = None
            last.fork_at = 0

    def dissolve(self) -> None:
        """Every member goes on alone."""
        for member in self.members:
            member.group = None
        self.members.clear()
        self.live.clear()

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


def lead(members: Sequence[Request]) -> None:
    """The first computes what they all begin with; the others wait for it."""
    leader, *followers = members
    leader.fork_at = common_start(members) if followers else 0
    for follower in followers:
        follower.leader, follower.awaits_fork = leader, True


def common_start(members: Sequence[Request]) -> int:
    """Tokens that are computed once: of members without outputs the whole prompt, as all draw from
    its logits; else what they have in common, but each keeps a token to compute, whose logits are
    its own.
    """
    first = members[0]
    if len(members) == 1 or first.num_output_tokens == 0:
        return first.num_tokens
    end = min(member.num_tokens for member in members) - 1
    for other in members[1:]:
        end = common_length(first.token_ids, other.token_ids, end)
    return end


def branches(members: Sequence[Request], start: int) -> list[list[Request]]:
    """Part members that have their first `start` tokens in common by the token that follows. One
    with no more than that token to compute goes alone.
    """
    parts: dict[int | Request, list[Request]] = {}
    for member in members:
        last = member.num_tokens - 1 <= start
        parts.setdefault(member if last else member.token_ids[start], []).append(member)
    return list(parts.values())


def shared_lengths(members: Sequence[Request]) -> list[tuple[int, int]]:
    """(tokens, tokens that it shares with one before it) of each member, in such an order that the
    latter are what a tree of them saves.
    """
    ordered = sorted(members, key=lambda member: member.token_ids)
    lengths, before = [], ordered[0]
    for member in ordered:
        most = min(before.num_tokens, member.num_tokens) - 1
        shared = 0 if member is before else common_length(before.token_ids, member.token_ids, most)
        lengths.append((member.num_tokens, shared))
        before = member
    return lengths


def common_length(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """How many tokens, at most so many, two sequences begin with in common."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
