"""`jaxpaged bench throughput | latency`: the engine alone, without a server."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpaged.bench import report
from jaxpaged.bench.lengths import Shape
from jaxpaged.bench.prompts import Sample, id_samples
from jaxpaged.bench.workload import custom_samples, shapes_of
from jaxpaged.config import EngineConfig
from jaxpaged.outputs import RequestOutput
from jaxpaged.progress import progress_bar
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.llm import LLM

EXIT_FAILED = 1
PERCENTILES = (10, 25, 50, 75, 90, 99)


def run_throughput(args: argparse.Namespace, config: EngineConfig) -> int:
    """All prompts at once. Returns the exit status: 1 if a request failed."""
    from jaxpaged import LLM

    args.seed = config.seed
    with LLM(config=config) as llm:
        if args.dataset_name == "custom":
            samples = custom_samples(args, args.num_prompts, conversations=True, token_ids=True)
        else:
            length = llm.engine.intake.limits.max_model_len
            shapes = shapes_of(args, args.num_prompts, length)
            samples = id_samples(shapes, _ids(llm), config.seed)
        prompts = [_prompt(llm, sample) for sample in samples]
        params = _params(samples, args)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=_shows_progress(config))
        elapsed = time.perf_counter() - start
    result = throughput(outputs, elapsed)
    text = (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_prompt_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}\n"
    )
    return max(_told(config, text, args.output_json, result), _failed(outputs))


def throughput(outputs: Sequence[RequestOutput], elapsed: float) -> dict[str, Any]:
    """The figures of a run that took `elapsed` seconds."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": prompt + made,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (prompt + made) / elapsed,
        "total_prompt_tokens": prompt,
        "total_output_tokens": made,
        "output_tokens_per_second": made / elapsed,
    }


def run_latency(args: argparse.Namespace, config: EngineConfig) -> int:
    """The same small batch of lengths again and again, always of new prompts, so that none comes
    from the prefix cache. Returns the exit status: 1 if a request failed.
    """
    from jaxpaged import LLM

    shapes = [Shape(args.input_len, args.output_len)] * args.batch_size
    latencies: list[float] = []
    failed = 0
    with LLM(config=config) as llm:
        ids = _ids(llm)
        rounds = args.num_iters_warmup + args.num_iters
        for turn in progress_bar(range(rounds), unit="batch", disable=not _shows_progress(config)):
            samples = id_samples(shapes, ids, config.seed + turn)
            prompts = [_prompt(llm, sample) for sample in samples]
            params = _params(samples, args)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if turn >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - start)
            failed = max(failed, _failed(outputs))
    result = latency(latencies)
    lines = [f"Avg latency: {result['avg_latency']} seconds"]
    lines += [
        f"{percentile}% percentile latency: {seconds} seconds"
        for percentile, seconds in result["percentiles"].items()
    ]
    return max(_told(config, "\n".join(lines) + "\n", args.output_json, result), failed)


def latency(latencies: Sequence[float]) -> dict[str, Any]:
    """The figures of batches that took so many seconds each."""
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": list(latencies),
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
    }


def _ids(llm: LLM) -> list[int]:
    """The token ids that prompts are made of."""
    intake = llm.engine.intake
    size, special = intake.limits.vocab_size, frozenset[int]()
    if intake.tokenizer is not None:
        size, special = min(size, intake.tokenizer.vocab_size), intake.tokenizer.special_ids
    return [token for token in range(size) if token not in special]


def _prompt(llm: LLM, sample: Sample) -> dict[str, Any]:
    if sample.messages is not None:
        return {"prompt_token_ids": llm.render_chat(sample.messages)[1]}
    key = "prompt" if isinstance(sample.prompt, str) else "prompt_token_ids"
    return {key: sample.prompt}


def _params(samples: Sequence[Sample], args: argparse.Namespace) -> list[SamplingParams]:
    base = SamplingParams(n=args.n, ignore_eos=True, detokenize=not args.disable_detokenize)
    return [dataclasses.replace(base, max_tokens=sample.output_tokens) for sample in samples]


def _shows_progress(config: EngineConfig) -> bool:
    return config.process_id == 0 and not config.disable_progress


def _failed(outputs: Sequence[RequestOutput]) -> int:
    errors = [c.error for output in outputs for c in output.outputs if c.finish_reason == "error"]
    if errors:
        sys.stderr.write(f"failed, {len(errors)} x: {errors[0]}\n")
    return EXIT_FAILED if errors else 0


def _told(config: EngineConfig, text: str, path: str | None, result: dict[str, Any]) -> int:
    """Print and save the figures, in one of several processes. Returns the exit status."""
    if config.process_id != 0:
        return 0
    sys.stdout.write(text)
    sys.stdout.flush()
    if path is not None:
        try:
            report.save(Path(path), result, append=False)
        except OSError as error:  # the figures are on the screen already
            sys.stderr.write(f"error: --output-json {path}: {error.strerror}.\n")
            return EXIT_FAILED
    return 0
