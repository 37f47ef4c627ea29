"""The offline run behind `jaxpaged generate`: jobs in, one record each out, in the same order."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.errors import InvalidRequestError, JaxpagedError
from jaxpaged.jobs import InputError, Job
from jaxpaged.outputs import CompletionOutput, EngineStats, LogprobDict, RequestOutput
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:  # at run time this module is loaded before jax may be
    from jaxpaged.llm import LLM


class OutputError(JaxpagedError, OSError):
    """Results could not be written."""


def run_jobs(
    llm: LLM,
    jobs: Sequence[Job],
    params: Mapping[str, Any],
    *,
    use_tqdm: bool,
    on_finished: Callable[[int, RequestOutput], None],
) -> list[RequestOutput]:
    """Run all jobs together and return their outputs in the order of `jobs`.

    `params` are the fields of the whole run: of beam searches if it has a `beam_width`, of sampling
    else. A job's own fields win over them, and sampling's over the defaults that come with the
    model. `on_finished` gets each output, with its place in
    `jobs`, as soon as it is complete. Raises `InputError`, which names the job, before anything
    runs: for sampling fields that contradict each other, a conversation that cannot be rendered,
    and a prompt that the model cannot take.
    """
    searches: list[BeamSearchParams] = []
    sampling: list[SamplingParams] = []
    if "beam_width" in params:
        searches = [BeamSearchParams.from_dict({**params, **job.params}) for job in jobs]
    else:
        defaults = llm.default_sampling_params()
        sampling = [_merge(defaults, params, job) for job in jobs]
    prompts: list[dict[str, Any]] = []
    rendered: dict[int, str] = {}
    for place, job in enumerate(jobs):
        prompt = _prompt(job)
        if job.messages is not None:
            try:
                rendered[place], prompt["prompt_token_ids"] = llm.render_chat(job.messages)
            except InvalidRequestError as error:
                raise InputError(f"{job.where}: {error}") from error
        prompts.append(prompt)

    def finished(place: int, output: RequestOutput) -> None:
        output.prompt = rendered.get(place, output.prompt)
        on_finished(place, output)

    priority = [job.priority for job in jobs]
    try:
        if searches:
            return llm.beam_search(
                prompts, searches, use_tqdm=use_tqdm, priority=priority, on_finished=finished
            )
        return llm.generate(
            prompts, sampling, use_tqdm=use_tqdm, priority=priority, on_finished=finished
        )
    except InvalidRequestError as error:
        if error.index is None:
            raise
        reason = error.__cause__ or error  # without "prompt N": the line says more
        raise InputError(f"{jobs[error.index].where}: {reason}") from error


def _merge(defaults: SamplingParams, params: Mapping[str, Any], job: Job) -> SamplingParams:
    try:
        return dataclasses.replace(defaults, **{**params, **job.params})
    except InvalidRequestError as error:
        raise InputError(f"{job.where}, with the model's defaults: {error}") from error


def _prompt(job: Job) -> dict[str, Any]:
    """The job's prompt as `LLM.generate` takes it; that of a conversation has no tokens yet."""
    prompt = {
        "prompt": job.prompt,
        "prompt_token_ids": job.prompt_token_ids,
        "cache_salt": job.cache_salt,
    }
    return {key: value for key, value in prompt.items() if value is not None}


class LineWriter:
    """Writes lines to a file, or with the path None to standard output.

    The file is opened, and emptied, for the first line: a run that yields nothing leaves an older
    file as it was. Every line is flushed, so that a run that ends early keeps what it wrote. Use it
    as a context manager. Raises `OutputError`, or `BrokenPipeError` where the reader of standard
    output left.
    """

    def __init__(self, path: str | None, flag: str = "--out") -> None:
        """`flag` is where the path comes from, for messages."""
        self._path = path
        self._flag = flag
        self._file: TextIO | None = None
        self.written = 0
        """Lines written."""

    def write(self, line: str) -> None:
        """Write one line; its end is added."""
        try:
            if self._file is None:
                self._file = self._open()
            with _progress_bars_aside(self._file):
                self._file.write(line + "\n")
                self._file.flush()
        except OSError as error:
            self._give_up()
            if self._path is None and isinstance(error, BrokenPipeError):
                raise
            name = "standard output" if self._path is None else f"{self._flag} {self._path}"
            reason = error.strerror or str(error)
            raise OutputError(f"{name}: {reason}; {self.written} results were written.") from error
        self.written += 1

    def _open(self) -> TextIO:
        if self._path is not None:
            return Path(self._path).open("w", encoding="utf-8")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the locale says
        return sys.stdout

    def _give_up(self) -> None:
        """Drop what could not be written: closing and Python's exit would try it again, and fail
        again.
        """
        if self._path is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        elif self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._path is not None and self._file is not None:
            self._file.close()


class ResultWriter(LineWriter):
    """Writes results as JSON lines in the order of the jobs, each as soon as all before it are
    in.
    """

    def __init__(self, path: str | None) -> None:
        super().__init__(path)
        self._waiting: dict[int, RequestOutput] = {}

    def add(self, place: int, output: RequestOutput) -> None:
        """Take the finished output of the job at `place`."""
        self._waiting[place] = output
        while self.written in self._waiting:
            result = record(self.written, self._waiting.pop(self.written))
            self.write(json.dumps(result, ensure_ascii=False, allow_nan=False))


def check_out(out: str | None, source: str | None, flag: str = "--out") -> None:
    """Find out before the run, not after it, that results cannot be written: to the file `out`, or
    to standard output. `source` is the file that prompts are read from. Raises `InputError`.
    """
    if out is None:
        if sys.stdout is None:
            raise InputError(f"standard output is closed; use {flag} for the results.")
        return
    path = Path(out)
    try:
        existed = path.exists()
        if existed and source not in (None, "-") and path.samefile(str(source)):
            raise InputError(f"{flag} {out} is the file that prompts are read from.")
        if path.is_fifo():
            return  # its reader would take a trial for the end
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.resolve().unlink()  # the run may yet yield nothing
    except OSError as error:
        raise InputError(f"{flag} {out}: {error.strerror}.") from error


def _progress_bars_aside(file: TextIO) -> AbstractContextManager[None]:
    """Takes progress bars off the terminal while a line is written to it."""
    if not file.isatty():
        return nullcontext()
    from tqdm import tqdm

    bars: AbstractContextManager[None] = tqdm.external_write_mode()
    return bars


def record(index: int, output: RequestOutput) -> dict[str, Any]:
    """One prompt's result as values that JSON can hold.

    The fields of the first completion are at the top; with n > 1, `outputs` holds all of them.
    """
    first = output.outputs[0]
    result: dict[str, Any] = {
        "index": index,
        "prompt": output.prompt,
        **_completion(first),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            None if position is None else _candidates(position)
            for position in output.prompt_logprobs
        ]
    if len(output.outputs) > 1:
        result["outputs"] = [_completion(completion) for completion in output.outputs]
    return result


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.score is not None:
        result["score"] = completion.score
        result["cumulative_logprob"] = completion.cumulative_logprob
    if completion.error is not None:
        result["error"] = completion.error
    if completion.logprobs is not None:
        result["logprobs"] = [_candidates(position) for position in completion.logprobs]
    return result


def _candidates(position: LogprobDict) -> list[dict[str, Any]]:
    """The candidates of one position as a list: JSON objects are not read in order everywhere."""
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
            "rank": entry.rank,
            "token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    ]


def summary(outputs: Iterable[RequestOutput], stats: EngineStats, seconds: float) -> str:
    """A few lines about a run: requests, tokens and tokens/s, and what the KV cache did.

    `seconds` is the wall time of the run alone, without loading and warm-up; `stats` are the
    engine's after it.
    """
    outputs = list(outputs)
    completions = [completion for output in outputs for completion in output.outputs]
    reasons = Counter(completion.finish_reason for completion in completions)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=str))
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    output_tokens = sum(len(completion.token_ids) for completion in completions)
    rate = 1.0 / max(seconds, 1e-9)
    usable = max(stats.num_blocks - 1, 1)
    return "\n".join(
        (
            f"requests     {len(outputs)} in {seconds:.2f} s ({ended})",
            f"prompt       {prompt} tokens, {prompt * rate:.1f} tokens/s"
            f" ({cached} of them from the prefix cache)",
            f"output       {output_tokens} tokens, {output_tokens * rate:.1f} tokens/s",
            f"KV blocks    {stats.peak_blocks_used} of {usable} at the peak"
            f" ({stats.peak_blocks_used / usable:.1%}), {stats.block_size} tokens each",
            f"KV waste     {stats.kv_waste:.1%} of allocated slots held no token",
            f"preemptions  {stats.preemptions}",
        )
    )
