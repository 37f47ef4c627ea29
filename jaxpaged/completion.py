"""What the engine keeps of one request beside the scheduler's view: text, logprobs, and how it is
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpaged.core.request import Request, RequestStatus
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
    logprobs: list[LogprobDict] | None = None
    cumulative_logprob: float | None = None
    last_token_time: float | None = None
    """Seconds of `time.monotonic()`."""
    _shown: CompletionOutput | None = None
    """The output built last; still true unless this completion has changed."""
    _told_tokens: int = 0
    """Tokens that deltas have reported."""
    _told_end: bool = False
    _text: str = ""
    """All that cumulative outputs have shown."""
    _pieces: list[str] = field(default_factory=list)
    """Text that no output has shown yet: to add to a long text would copy it for every token."""

    def append(self, token: int, *, last: bool = False) -> str | None:
        """Take a delivered token; returns the stop string that it completes, if any.

        `last`: the token ended the request as EOS or stop id, so its text is left out unless asked
        for.
        """
        self.token_ids.append(token)
        if self.detokenizer is None:
            return None
        matched = None
        if last and not self.parent.params.include_stop_str_in_output:
            delta = ""
        else:
            delta = self.detokenizer.push(token)
        if self.stop is not None:
            delta, matched = self.stop.push(delta, len(self.token_ids))
        if delta:
            self._pieces.append(delta)
        return matched

    def close_text(self) -> str | None:
        """The request has ended for another reason than a stop string: release what was held back.

        Returns the stop string that the last, unfinished character completes (U+FFFD only), if any.
        """
        if self.detokenizer is None:
            return None
        rest = self.detokenizer.finish()
        if self.stop is None:
            self._pieces.append(rest)
            return None
        if self.stop.matched is None:
            shown, matched = self.stop.push(rest, len(self.token_ids))
            self._pieces.append(shown + (self.stop.finish() if matched is None else ""))
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

    def output(self) -> CompletionOutput:
        core, shown = self.core, self._shown
        if shown is not None and core.is_finished and shown.finish_reason == core.finish_reason:
            return shown  # one of many samples, ended before
        self._text += self._take_text()
        self._shown = output = CompletionOutput(self.index, self._text, self.token_ids.copy())
        self._complete(output, 0)
        return output

    def delta(self, interval: int) -> CompletionOutput | None:
        """What is new since the last delta; None while that is fewer than `interval` tokens.

        The first token and the end are always told at once.
        """
        core, told, total = self.core, self._told_tokens, len(self.token_ids)
        ended = core.status is RequestStatus.FINISHED
        if self._told_end or (not ended and (total == told or 0 < told > total - interval)):
            return None
        self._told_tokens, self._told_end = total, ended
        output = CompletionOutput(self.index, self._take_text(), self.token_ids[told:])
        if ended or self.logprobs is not None:
            self._complete(output, told)
        return output

    def _complete(self, output: CompletionOutput, told: int) -> None:
        """Fill in what the outputs of most tokens do not have."""
        core = self.core
        output.finish_reason, output.stop_reason = core.finish_reason, core.stop_reason
        output.error = core.error
        if self.logprobs is not None:
            output.cumulative_logprob = self.cumulative_logprob
            output.logprobs = self.logprobs[told:]
            output.logprobs_mode = self.parent.params.logprobs_mode

    def _take_text(self) -> str:
        """What no output has shown yet."""
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces.pop()
        text = "".join(pieces)
        pieces.clear()
        return text


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
        for completion in self.completions:
            if completion.core.status is not RequestStatus.FINISHED:
                return False
        return True

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
        outputs = [completion.output() for completion in self.completions]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            None not in [output.finish_reason for output in outputs],
            self.completions[0].core.num_cached_tokens,
            self._complete_prompt(),
            self.times,
            sum([completion.core.num_preemptions for completion in self.completions]),
        )

    def delta(self) -> RequestOutput | None:
        """What is new since the last delta, samples without news left out; None if nothing is.

        Prompt logprobs come once, with the first delta after they are complete.
        """
        outputs, finished, num_preemptions = [], True, 0
        for completion in self.completions:
            core = completion.core
            num_preemptions += core.num_preemptions
            if core.status is not RequestStatus.FINISHED:
                finished = False
            output = completion.delta(self.delta_interval)
            if output is not None:
                outputs.append(output)
        if not outputs:
            return None
        prompt = None
        if self.prompt_logprobs is not None and not self._told_prompt:
            prompt = self._complete_prompt()
            self._told_prompt = prompt is not None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            finished,
            self.completions[0].core.num_cached_tokens,
            prompt,
            self.times,
            num_preemptions,
        )

    def _complete_prompt(self) -> list[LogprobDict | None] | None:
        prompt = self.prompt_logprobs
        if prompt is None or any(entry is None for entry in prompt[1:]):
            return None
        return list(prompt)


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
