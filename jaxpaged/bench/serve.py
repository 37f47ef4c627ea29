"""`jaxpaged bench serve`: measure any server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import resource
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxpaged import __version__
from jaxpaged.bench import report
from jaxpaged.bench.arrivals import Ramp, send_times
from jaxpaged.bench.lengths import Shape
from jaxpaged.bench.load import Sender, body_of, send_all
from jaxpaged.bench.metrics import Record, details, summarise
from jaxpaged.bench.prompts import Sample, TextMaker, count_words, id_samples
from jaxpaged.bench.target import Target, TargetError
from jaxpaged.bench.wire import Client, WireError
from jaxpaged.bench.workload import custom_samples, open_tokenizer, shapes_of
from jaxpaged.config import client_api_key
from jaxpaged.progress import progress_bar
from jaxpaged.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
SHOWN_ERRORS = 5
GUESSED_IDS = range(256, 4096)
"""Token ids that nearly every vocabulary has, and seldom as special tokens."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""Sampling fields that have flags of their own."""


@dataclass
class Outcome:
    """What a run came to, whole or cut short."""

    model: str
    records: list[Record]
    began: float
    duration: float
    unfinished: int
    """Requests that were under way, or not sent, when the run was interrupted."""
    without_usage: int


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, save the JSON. Returns the exit status: 1 if a request failed."""
    tokenizer = open_tokenizer(args.tokenizer) if args.tokenizer else None
    _raise_file_limit(args.max_concurrency or args.num_prompts)
    try:
        outcome = asyncio.run(_measure(args, tokenizer))
    except TargetError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except WireError as error:
        sys.stderr.write(
            f"error: {error}\nIs the server there? `jaxpaged serve MODEL` starts one at "
            "http://127.0.0.1:8000; --base-url names another.\n"
        )
        return EXIT_FAILED
    load = report.Load(args.request_rate, args.burstiness, args.max_concurrency)
    summary = summarise(outcome.records, outcome.duration, args.goodput)
    table = report.lines(summary, load, args.percentile_metrics, args.metric_percentiles)
    sys.stdout.write("\n".join(table) + "\n")
    sys.stdout.flush()
    _tell_problems(outcome)
    if args.save_result or args.append_result:
        result = {
            **_settings(args, outcome),
            **report.as_json(summary, args.metric_percentiles),
        }
        if args.save_detailed:
            result |= details(outcome.records, outcome.began)
        _save(args, result, load, outcome.model)
    if outcome.unfinished:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failed or not summary.completed else 0


async def _measure(args: argparse.Namespace, tokenizer: Tokenizer | None) -> Outcome:
    headers = {"user-agent": f"jaxpaged/{__version__}", **args.header}
    key = args.api_key or client_api_key()
    if key is not None and "authorization" not in {name.lower() for name in headers}:
        headers["authorization"] = f"Bearer {key}"
    client = Client(args.base_url, headers, timeout=args.request_timeout_sec)
    try:
        target = Target(client, args.endpoint)
        patience = args.ready_check_timeout_sec
        asked = args.served_model_name or args.model
        model, max_model_len = await target.served_model(asked, patience)
        spare = args.num_warmups + (1 if patience else 0)
        count = args.num_prompts + spare
        if args.dataset_name == "custom":
            samples = _samples_of_file(args, target, count)
        else:
            shapes = shapes_of(args, count, max_model_len)
            samples = await _made_samples(shapes, args.seed, target, model, tokenizer)
        extra = {name: getattr(args, name) for name in SAMPLING}
        extra = {name: value for name, value in extra.items() if value is not None}
        bodies = [
            body_of(
                sample,
                model,
                chat=target.chat,
                ignore_eos=args.ignore_eos,
                extra={**extra, **args.extra_body},
            )
            for sample in samples
        ]
        sender = Sender(
            client,
            args.endpoint,
            count_tokens=None if tokenizer is None else lambda text: len(tokenizer.encode(text)),
        )
        # Prompts of a file may be fewer than asked for; then the first ones warm up as well.
        warm = list(zip(samples, bodies, strict=True))[-spare:] if spare else []
        count = min(args.num_prompts, len(samples))
        if patience:
            await _until_answered(sender, *warm.pop(), patience)
        await _warm_up(sender, warm, args.max_concurrency)
        sender.without_usage = 0
        return await _run(args, sender, samples[:count], bodies[:count], model)
    finally:
        await client.close()


def _samples_of_file(args: argparse.Namespace, target: Target, count: int) -> list[Sample]:
    samples = custom_samples(args, count, conversations=target.chat, token_ids=not target.chat)
    if len(samples) < args.num_prompts:
        _log.warning("%s has %d prompts only.", args.dataset_path, len(samples))
    return samples


async def _made_samples(
    shapes: list[Shape], seed: int, target: Target, model: str, tokenizer: Tokenizer | None
) -> list[Sample]:
    """Prompts of these lengths, by the best means at hand."""
    if tokenizer is not None:

        async def local(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=not target.chat))

        return await _texts(TextMaker(local), shapes, seed)

    async def remote(text: str) -> int:
        return await target.count_tokens(model, text)

    try:
        await remote("a")
    except TargetError:
        if await target.takes_token_ids(model, list(GUESSED_IDS)[:4]):
            _log.info("The server has no /tokenize: prompts are sent as random token ids.")
            return id_samples(shapes, GUESSED_IDS, seed)
        _log.warning(
            "The server has no /tokenize, and no --tokenizer was given: prompts have as many words "
            "as tokens were asked for, so their lengths are only about right."
        )
        return await TextMaker(count_words).samples(shapes, seed)
    return await _texts(TextMaker(remote), shapes, seed)


async def _texts(maker: TextMaker, shapes: list[Shape], seed: int) -> list[Sample]:
    samples = await maker.samples(shapes, seed)
    if maker.largest_miss:
        _log.warning("Prompts differ by up to %d tokens from their lengths.", maker.largest_miss)
    return samples


async def _until_answered(sender: Sender, sample: Sample, body: bytes, patience: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        record = await sender(sample, body)
        if record.error is None:
            return
        if loop.time() >= deadline:
            raise TargetError(f"no request succeeded within {patience:g} s: {record.error}")
        await asyncio.sleep(1.0)


async def _warm_up(
    sender: Sender, warm: list[tuple[Sample, bytes]], max_concurrency: int | None
) -> None:
    failed: list[str] = []

    def note(_: int, record: Record) -> None:
        if record.error is not None:
            failed.append(record.error)

    await send_all(lambda i: sender(*warm[i]), [0.0] * len(warm), max_concurrency, note)
    if failed:
        _log.warning("%d of %d warm-up requests failed: %s", len(failed), len(warm), failed[0])


async def _run(
    args: argparse.Namespace,
    sender: Sender,
    samples: list[Sample],
    bodies: list[bytes],
    model: str,
) -> Outcome:
    ramp = None
    if args.ramp_up_strategy is not None:
        ramp = Ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    times = send_times(len(samples), args.request_rate, args.burstiness, args.seed, ramp)
    found: dict[int, Record] = {}
    bar = progress_bar(total=len(samples), unit="request", disable=args.disable_tqdm)

    def finished(index: int, record: Record) -> None:
        found[index] = record
        bar.update(1)

    began = time.perf_counter()
    with bar, suppress(asyncio.CancelledError):  # Ctrl-C: what there is by then is told
        await send_all(
            lambda index: sender(samples[index], bodies[index]),
            times,
            args.max_concurrency,
            finished,
        )
    return Outcome(
        model=model,
        records=[found[index] for index in sorted(found)],
        began=began,
        duration=time.perf_counter() - began,
        unfinished=len(samples) - len(found),
        without_usage=sender.without_usage,
    )


def _tell_problems(outcome: Outcome) -> None:
    errors = Counter(record.error for record in outcome.records if record.error is not None)
    for text, count in errors.most_common(SHOWN_ERRORS):
        sys.stderr.write(f"failed, {count} x: {text}\n")
    if len(errors) > SHOWN_ERRORS:
        sys.stderr.write(f"... and {len(errors) - SHOWN_ERRORS} other errors\n")
    if outcome.without_usage:
        sys.stderr.write(
            f"{outcome.without_usage} answers came without usage: their output tokens are counted "
            "by the tokenizer, or as one a chunk.\n"
        )
    if outcome.unfinished:
        sys.stderr.write(
            f"interrupted: {outcome.unfinished} requests had not ended and are not counted\n"
        )


def _settings(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """How the run was made, for the JSON."""
    return {
        **args.metadata,
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "endpoint_type": args.backend,
        "base_url": args.base_url,
        "endpoint": args.endpoint,
        "model_id": outcome.model,
        "tokenizer_id": args.tokenizer or args.model or outcome.model,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "interrupted": outcome.unfinished > 0,
    }


def _save(args: argparse.Namespace, result: dict[str, Any], load: report.Load, model: str) -> None:
    name = args.result_filename or report.file_name(args.backend, load, model, datetime.now())
    path = Path(args.result_dir or ".") / name
    try:
        report.save(path, result, append=args.append_result)
    except OSError as error:
        # After the run: its figures are on the screen already.
        sys.stderr.write(f"error: {path}: {error.strerror}; the result was not saved.\n")
    else:
        sys.stderr.write(f"saved to {path}\n")


def _raise_file_limit(connections: int) -> None:
    """Every request under way has a connection, and the usual limit is 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
