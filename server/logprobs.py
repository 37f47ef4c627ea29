"""Log-probabilities in the shapes of the two endpoints: the model's, before temperature, penalties
and masks, or with logprobs_mode "processed" those of what the tokens were drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxpaged.outputs import Logprob, LogprobDict
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from server.protocol_chat import ContentLogprob, TokenLogprob
from server.protocol_common import PromptLogprob, PromptLogprobs
from server.protocol_completions import LegacyLogprobs

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Told instead of minus infinity, which JSON does not have."""


class TokenNames:
    """How tokens are written: as text, or as token_id:N, which never collides."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def name(self, token: int, entry: Logprob | None = None) -> str:
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.tokenizer.token(token)

    def bytes_of(self, token: int) -> list[int] | None:
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token))


class TextOffsets:
    """Where each token begins in a text that grows, in characters.

    These are the sums of the lengths of the tokens' texts, as long as the tokens are whole
    characters and all shown; and right where they are not.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._at = 0
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
            )

    def next(self, token: int) -> int:
        at = self._at
        if self._detokenizer is not None:
            self._at += len(self._detokenizer.push(token))
        return at

    def echo(self, ids: Sequence[int], text: str, *, shows_special_tokens: bool) -> list[int]:
        """Offsets of the prompt's tokens in its text, which stands in front of the output."""
        self._at = len(text)
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [0] * len(ids)
        detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=not shows_special_tokens
        )
        offsets, at = [], 0
        for i, token in enumerate(ids):
            offsets.append(min(at, len(text)))
            added = i == 0 and token in tokenizer.special_ids
            if added and not text.startswith(tokenizer.token(token)):
                continue  # the BOS that the tokenizer put in front is not in the text
            at += len(detokenizer.push(token))
        return offsets


def legacy(
    names: TokenNames,
    token_ids: Iterable[int],
    entries: Iterable[LogprobDict | None],
    offsets: Iterable[int],
) -> LegacyLogprobs:
    """The four lists of /v1/completions. An entry holds the token itself and the likeliest."""
    result = LegacyLogprobs([], [], [], [])
    for token, entry, offset in zip(token_ids, entries, offsets, strict=True):
        own = None if entry is None else entry[token]
        result.text_offset.append(offset)
        result.tokens.append(names.name(token, own))
        result.token_logprobs.append(None if own is None else max(own.logprob, LOWEST))
        result.top_logprobs.append(None if entry is None else _by_name(names, entry))
    return result


def extend(whole: LegacyLogprobs, more: LegacyLogprobs) -> None:
    whole.text_offset += more.text_offset
    whole.token_logprobs += more.token_logprobs
    whole.tokens += more.tokens
    whole.top_logprobs += more.top_logprobs


def content(
    names: TokenNames, token_ids: Iterable[int], entries: Iterable[LogprobDict], top: int
) -> list[ContentLogprob]:
    """The list of /v1/chat/completions; `top` of the likeliest at each place, -1 is all."""
    result = []
    for token, entry in zip(token_ids, entries, strict=True):
        own = entry[token]
        ranked = sorted(entry.items(), key=_likeliest) if top else []
        result.append(
            ContentLogprob(
                names.name(token, own),
                max(own.logprob, LOWEST),
                names.bytes_of(token),
                [
                    TokenLogprob(
                        names.name(other, value),
                        max(value.logprob, LOWEST),
                        names.bytes_of(other),
                    )
                    for other, value in (ranked if top < 0 else ranked[:top])
                ],
            )
        )
    return result


def prompt(entries: Iterable[LogprobDict | None]) -> PromptLogprobs:
    """What prompt_logprobs asks for, in both endpoints."""
    return [
        None
        if entry is None
        else {
            str(token): PromptLogprob(max(value.logprob, LOWEST), value.rank, value.decoded_token)
            for token, value in entry.items()
        }
        for entry in entries
    ]


def _by_name(names: TokenNames, entry: LogprobDict) -> dict[str, float]:
    by_name: dict[str, float] = {}
    for token, value in entry.items():
        name, logprob = names.name(token, value), max(value.logprob, LOWEST)
        # Tokens of different bytes may read alike; the likelier one keeps the name.
        by_name[name] = max(logprob, by_name.get(name, LOWEST))
    return by_name


def _likeliest(item: tuple[int, Logprob]) -> float:
    return -item[1].logprob
