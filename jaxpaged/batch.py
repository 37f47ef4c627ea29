"""The offline run behind `jaxpaged generate`: jobs in, one record each out, in the same order."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.errors import InvalidRequestError
from jaxpaged.jobs import InputError, Job
from jaxpaged.outputs import CompletionOutput, EngineStats, LogprobDict, RequestOutput
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:  # at run time this module is loaded before jax may be
    from jaxpaged.llm import LLM


def run_jobs(
    llm: LLM, jobs: Sequence[Job], params: Mapping[str, Any], *, use_tqdm: bool
) -> list[RequestOutput]:
    """Run all jobs and return their outputs in the order of `jobs`.

    `params` are the sampling fields of the whole run. A job's own fields win over them, and both
    over the defaults that come with the model. Raises `InputError` for a combination of the
    three that is invalid, before anything runs.
    """
    defaults = llm.default_sampling_params()
    sampling = [_merge(defaults, params, job) for job in jobs]
    outputs: dict[int, RequestOutput] = {}
    plain = [i for i, job in enumerate(jobs) if job.messages is None]
    if plain:
        results = llm.generate(
            [_prompt(jobs[i]) for i in plain], [sampling[i] for i in plain], use_tqdm=use_tqdm
        )
        outputs.update(zip(plain, results, strict=True))
    chats = [i for i, job in enumerate(jobs) if job.messages is not None]
    if chats:
        conversations = [list(jobs[i].messages or ()) for i in chats]
        results = llm.chat(conversations, [sampling[i] for i in chats], use_tqdm=use_tqdm)
        outputs.update(zip(chats, results, strict=True))
    return [outputs[i] for i in range(len(jobs))]


def _merge(defaults: SamplingParams, params: Mapping[str, Any], job: Job) -> SamplingParams:
    try:
        return dataclasses.replace(defaults, **{**params, **job.params})
    except InvalidRequestError as error:
        raise InputError(f"{job.where}, with the model's defaults: {error}") from error


def _prompt(job: Job) -> str | dict[str, Any]:
    """The job's prompt in a form that `LLM.generate` takes."""
    if job.cache_salt is None and job.prompt is not None:
        return job.prompt
    prompt: dict[str, Any] = {"prompt": job.prompt, "prompt_token_ids": job.prompt_token_ids}
    prompt["cache_salt"] = job.cache_salt
    return {key: value for key, value in prompt.items() if value is not None}


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
