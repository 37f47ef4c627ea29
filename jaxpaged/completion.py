"""What the engine keeps of one request beside the scheduler's view: text, logprobs, and how it is
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpaged.core.request import Request
from jaxpaged.device.packing import RowRequest
from jaxpaged.device.sampler import HostSamples
from jaxpaged.device.sampling_state import SlotValues, pack_slot
from jaxpaged.outputs import (
    CompletionOutput,
    Logprob,
    LogprobDict,
    RequestOutput,
    RequestTimes,
)
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.detokenizer import IncrementalDetokenizer
from jaxpaged.text.stop import StopChecker
from jaxpaged.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SlotRecipe:
    """A request's sampling data in short; the arrays, kilobytes each, are made at admission."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    max_model_len: int

    def pack(self, tokens: Sequence[int]) -> SlotValues:
        """The slot's arrays with the history of `tokens`. Raises `InvalidRequestError` if the data
        does not fit a slot, whatever the tokens are.
        """
        return pack_slot(self.params, self.stop_ids, self.bad_words, tokens, self.max_model_len)


@dataclass(slots=True)
class Completion:
    """One of a request's n samples. It is the payload of its scheduler request."""

    parent: RequestState
    index: int
    row: RowRequest
    detokenizer: IncrementalDetokenizer | None
    stop: StopChecker | None
    core: Request = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[LogprobDict] | None = None
    cumulative_logprob: float | None = None
    last_token_time: float | None = None
    """Seconds of `time.monotonic()`."""
    _shown: CompletionOutput | None = None
    """The output built last; still true unless this completion has changed."""
    _told_tokens: int = 0
    """Tokens that deltas have reported."""
    _told_chars: int = 0
    _told_end: bool = False

    def append(self, token: int, *, last: bool) -> str | None:
        """Take a delivered token; returns the stop string that it completes, if any.

        `last`: the token ended the request as EOS or stop id, so its text is left out unless asked
        for.
        """
        self.token_ids.append(token)
        if self.detokenizer is None:
            return None
        params = self.parent.params
        hide = last and not params.include_stop_str_in_output
        delta = "" if hide else self.detokenizer.push(token)
        if self.stop is None:
            self.text += delta
            return None
        shown, matched = self.stop.push(delta, len(self.token_ids))
        self.text += shown
        return matched

    def close_text(self) -> str | None:
        """The request has ended for another reason than a stop string: release what was held back.

        Returns the stop string that the last, unfinished character completes (U+FFFD only), if any.
        """
        if self.detokenizer is None:
            return None
        rest = self.detokenizer.finish()
        if self.stop is None:
            self.text += rest
            return None
        if self.stop.matched is None:
            shown, matched = self.stop.push(rest, len(self.token_ids))
            self.text += shown + (self.stop.finish() if matched is None else "")
            return matched
        return None

    def add_logprobs(self, samples: HostSamples, row: int) -> None:
        """Logprobs of the token drawn in this row of a step, if the request asked for them."""
        count = self.row.fields.num_logprobs
        if count < 0:
            return
        entry = logprob_dict(samples, row, count, self.parent.tokenizer)
        if self.logprobs is None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        self.logprobs.append(entry)
        assert self.cumulative_logprob is not None
        self.cumulative_logprob += float(samples.logprob[row])

    @property
    def _logprobs_mode(self) -> str | None:
        return None if self.logprobs is None else self.parent.params.logprobs_mode

    def output(self) -> CompletionOutput:
        core, shown = self.core, self._shown
        if shown is not None and core.is_finished and shown.finish_reason == core.finish_reason:
            return shown  # one of many samples, ended before
        self._shown = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=core.finish_reason,
            stop_reason=core.stop_reason,
            error=core.error,
            logprobs_mode=self._logprobs_mode,
        )
        return self._shown

    def delta(self, interval: int) -> CompletionOutput | None:
        """What is new since the last delta; None while that is fewer than `interval` tokens.

        The first token and the end are always told at once.
        """
        told, ended = self._told_tokens, self.core.is_finished
        new = len(self.token_ids) - told
        if self._told_end or (not ended and (new == 0 or (told > 0 and new < interval))):
            return None
        output = CompletionOutput(
            index=self.index,
            text=self.text[self._told_chars :],
            token_ids=self.token_ids[told:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[told:],
            finish_reason=self.core.finish_reason,
            stop_reason=self.core.stop_reason,
            error=self.core.error,
            logprobs_mode=self._logprobs_mode,
        )
        self._told_tokens, self._told_chars = len(self.token_ids), len(self.text)
        self._told_end = ended
        return output


@dataclass(slots=True)
class RequestState:
    """One request as its user sees it: n completions and, if asked for, the prompt's logprobs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    tokenizer: Tokenizer | None
    slot: SlotRecipe | None
    """What must be written to the slot at each admission; None if its sampling reads nothing."""
    times: RequestTimes
    delta_interval: int = 0
    """Tokens between two outputs, which then tell only what is new; 0: every output tells all."""
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[LogprobDict | None] | None = None
    _told_prompt: bool = False

    @property
    def finished(self) -> bool:
        return all(c.core.is_finished for c in self.completions)

    def add_prompt_logprobs(
        self, samples: HostSamples, first_row: int, position: int, count: int
    ) -> None:
        """Logprobs of the prompt tokens that follow a chunk's `count` tokens from `position` on.

        The first ones stay: a sequence that has outgrown its rotary frequencies computes its prompt
        again with others.
        """
        assert self.prompt_logprobs is not None and self.params.prompt_logprobs is not None
        wanted = self.params.prompt_logprobs
        for offset in range(count):
            target = position + offset + 1
            if target < len(self.prompt_token_ids) and self.prompt_logprobs[target] is None:
                entry = logprob_dict(samples, first_row + offset, wanted, self.tokenizer)
                self.prompt_logprobs[target] = entry

    def forget_unfinished_prompt(self) -> None:
        """The prompt is computed again with other weights: its logprobs, unless they are complete,
        shall all be of those.
        """
        if self.prompt_logprobs is not None and self._complete_prompt() is None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)

    def output(self) -> RequestOutput:
        """Everything so far. Prompt logprobs are shown once they are complete."""
        return self._output([c.output() for c in self.completions], self._complete_prompt())

    def delta(self) -> RequestOutput | None:
        """What is new since the last delta, samples without news left out; None if nothing is.

        Prompt logprobs come once, with the first delta after they are complete.
        """
        deltas = [c.delta(self.delta_interval) for c in self.completions]
        outputs = [output for output in deltas if output is not None]
        if not outputs:
            return None
        prompt = None if self._told_prompt else self._complete_prompt()
        self._told_prompt = self._told_prompt or prompt is not None
        return self._output(outputs, prompt)

    def _complete_prompt(self) -> list[LogprobDict | None] | None:
        prompt = self.prompt_logprobs
        if prompt is None or any(entry is None for entry in prompt[1:]):
            return None
        return list(prompt)

    def _output(
        self, outputs: list[CompletionOutput], prompt: list[LogprobDict | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.completions[0].core.num_cached_tokens,
            prompt_logprobs=prompt,
            times=self.times,
            num_preemptions=sum(c.core.num_preemptions for c in self.completions),
        )


def logprob_dict(
    samples: HostSamples, row: int, count: int, tokenizer: Tokenizer | None
) -> LogprobDict:
    """The drawn (or given) token first, then the `count` likeliest (-1: all that the program
    gives).
    """
    token = int(samples.tokens[row])
    entry = {
        token: Logprob(float(samples.logprob[row]), int(samples.rank[row]), _text(tokenizer, token))
    }
    asked = slice(None if count < 0 else count)
    ids: Sequence[int] = samples.top_ids[row, asked].tolist()
    values: Sequence[float] = samples.top_logprobs[row, asked].tolist()
    for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
        if other != token and other >= 0:
            entry[other] = Logprob(value, rank, _text(tokenizer, other))
    return entry


def _text(tokenizer: Tokenizer | None, token: int) -> str | None:
    return None if tokenizer is None else tokenizer.token(token)
