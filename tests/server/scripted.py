"""The real engine (scheduler, intake, detokenizer, stop strings) without model or device: a script
says which token each request draws.

    script = Script(default="word " * 8)
    script.reply("the prompt", ["pie", "ces"])          # pieces of text become tokens of their own
    async with running(script) as engine: ...           # an AsyncEngine
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.device.beam_candidates import num_candidates
from jaxpaged.device.buckets import Buckets, choose_buckets
from jaxpaged.device.compile_ledger import CompileLedger
from jaxpaged.device.packing import Layout, PackedStep, RowRequest, is_decode, pack
from jaxpaged.device.runner import StepResult
from jaxpaged.device.sampler import HostSamples
from jaxpaged.device.sampling_state import BEAM
from jaxpaged.engine import Engine
from jaxpaged.engine_thread import Progress
from jaxpaged.intake import Intake, Limits
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.tokenizer import Tokenizer
from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

TOP = 20
"""Logprobs that the scripted device returns at most."""
TILE = 8


@dataclass
class Script:
    """What the model says. Change it between requests; it is read on the engine's thread."""

    default: Sequence[str] | Sequence[int] | str = "one two three four five six seven eight"
    """The reply to every prompt without one of its own: text, pieces of text, or token ids."""
    end: bool = True
    """A reply ends with EOS; else it starts over and over again."""
    replies: dict[str, Sequence[str] | Sequence[int] | str] = field(default_factory=dict)
    """Prompt text, or a part of it, -> reply."""
    samples: Sequence[Sequence[str] | Sequence[int] | str] = ()
    """Replies of the first samples of every prompt, by index, where they are to differ."""
    step_seconds: float = 0.0
    """How long each step takes on the device."""
    gate: threading.Event | None = None
    """Steps are read only while this is set."""
    fail_launch: Callable[[int], BaseException | None] = field(default=lambda step: None)
    """Step number, from 0 -> an error to raise when it is launched."""
    fail_read: Callable[[int], BaseException | None] = field(default=lambda step: None)
    top: Callable[[int, int], list[tuple[int, float]]] | None = None
    """(token, output position) -> the likeliest ids with their logprobs."""
    special_pieces: Sequence[str] = ()
    """Texts that become tokens of their own, besides those of replies given at the start."""
    chat_template: str = CHAT_TEMPLATE
    vocab_size: int = 1024
    """Of the model; the tokenizer is smaller."""

    def reply(self, prompt: str, reply: Sequence[str] | Sequence[int] | str) -> None:
        self.replies[prompt] = reply

    def make_tokenizer(self) -> Tokenizer:
        backend = tiny_tokenizer()
        pieces = list(self.special_pieces)
        for reply in (self.default, *self.replies.values(), *self.samples):
            pieces += [p for p in reply if isinstance(p, str)] if not isinstance(reply, str) else []
        known = backend.get_vocab()
        backend.add_tokens(
            [AddedToken(p, normalized=False) for p in dict.fromkeys(pieces) if p not in known]
        )
        return Tokenizer(
            backend,
            special_tokens={"bos_token": BOS, "eos_token": EOS},
            chat_templates={"default": self.chat_template} if self.chat_template else {},
        )


def waits(event: threading.Event, step: int) -> Callable[[int], BaseException | None]:
    """For `Script.fail_read`: from that step on the model stands still until `event` is set."""

    def wait(number: int) -> BaseException | None:
        if number < step or event.wait(60):
            return None
        return AssertionError("the event never came")

    return wait


class ScriptedRunner:
    """Stands in for `device.runner.Runner`: the same calls, no device."""

    alone = True
    unready: str | None = None
    dtype_name = "float32"
    cache_dtype_name = "float32"
    attention_backend = "reference"
    deterministic = True
    num_devices = 1

    def __init__(
        self, script: Script, tokenizer: Tokenizer | None, buckets: Buckets, max_num_seqs: int,
        max_model_len: int, block_size: int, vocab_size: int,
    ) -> None:  # fmt: skip
        self.script = script
        self.buckets = buckets
        self.ledger = CompileLedger()
        self.ledger.warm = True
        self.num_launched = 0
        self.num_read = 0
        self.num_resets = 0
        self.copied: list[tuple[int, int]] = []
        """Blocks copied, source and destination."""
        self.closed = False
        self._tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        self._width = -(-max_model_len // block_size)
        self._vocab_size = vocab_size
        self._replies: dict[str, list[int]] = {}

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 4096, "kv_cache": 8192, "sampling_state": 64}

    def admit(self, slot: int, values: Any) -> None:
        assert 0 <= slot < self._max_num_seqs

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert copies
        self.copied += copies

    def pack(self, rows: Sequence[Any], requests: Sequence[RowRequest]) -> PackedStep:
        prompt_tokens = sum(
            row.num_tokens for row, r in zip(rows, requests, strict=True) if not is_decode(row, r)
        )
        layout = Layout(self.buckets.shape_for(len(rows), prompt_tokens), self._width, TILE, 1)
        packed = pack(rows, requests, layout, self._max_num_seqs)
        # What the results will be is known now; a request may have grown before they are read.
        self._pending = self._results(rows, requests, packed)
        return packed

    def launch(self, packed: PackedStep, *, wants_prompt: bool) -> Any:
        number, self.num_launched = self.num_launched, self.num_launched + 1
        error = self.script.fail_launch(number)
        if error is not None:
            raise error
        return number, packed, *self._pending

    def is_ready(self, launched: Any) -> bool:
        return True

    def read(self, launched: Any) -> StepResult:
        number, packed, samples, prompt, beams = launched
        self.num_read += 1
        if self.script.gate is not None:
            assert self.script.gate.wait(60), "the gate was never opened"
        if self.script.step_seconds:
            time.sleep(self.script.step_seconds)
        error = self.script.fail_read(number)
        if error is not None:
            raise error
        return StepResult(packed, samples, prompt, beams)

    def reset(self) -> None:
        self.num_resets += 1

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------ what the model says

    def _results(
        self, rows: Sequence[Any], requests: Sequence[RowRequest], packed: PackedStep
    ) -> tuple[HostSamples, HostSamples, tuple[Any, Any]]:
        shape = packed.layout.shape
        samples, prompt = _blank(shape.rows), _blank(max(shape.tokens, 1))
        count = num_candidates(self._max_num_seqs, self._vocab_size)
        ids = np.zeros((shape.rows, count), np.int32)
        logprobs = np.full((shape.rows, count), -np.inf, np.float32)
        for row, place, start, own in zip(
            rows, packed.order, packed.prompt_start, requests, strict=True
        ):
            request = row.request
            if row.samples and own.fields.flags & BEAM:
                # What the script says is likeliest, then the ids that follow it.
                said = self._token(request, row.start + row.num_tokens - request.num_prompt_tokens)
                ids[place] = (said + np.arange(count)) % self._vocab_size
                logprobs[place] = -(np.arange(count) + 1.0) / 8
            elif row.samples:
                position = row.start + row.num_tokens - request.num_prompt_tokens
                self._fill(samples, place, self._token(request, position), position)
            if start >= 0:
                known = request.token_ids
                for i in range(row.num_tokens):
                    if row.start + i + 1 < len(known):
                        self._fill(prompt, start + i, known[row.start + i + 1], row.start + i)
        return samples, prompt, (ids, logprobs)

    def _fill(self, samples: HostSamples, place: int, token: int, position: int) -> None:
        if self.script.top is not None:
            top = self.script.top(token, position)
        else:  # the drawn token is the likeliest; its logprob tells tokens and positions apart
            others = [(token + i) % self._vocab_size for i in range(1, TOP)]
            first = -(1 + (token * 31 + position * 7) % 50) / 64
            top = [(token, first), *((o, first - i / 8) for i, o in enumerate(others, start=1))]
        by_id = dict(top)
        samples.tokens[place] = token
        samples.logprob[place] = by_id.get(token, -20.0)
        ids = [i for i, _ in top]
        samples.rank[place] = 1 + ids.index(token) if token in by_id else len(top) + 1
        samples.top_ids[place, : len(top)] = ids
        samples.top_logprobs[place, : len(top)] = [value for _, value in top]

    def _token(self, request: Request, position: int) -> int:
        reply = self._replies.get(request.request_id)
        if reply is None:
            reply = self._replies[request.request_id] = self._reply_to(request)
        if position < len(reply):
            return reply[position]
        if self.script.end and self._tokenizer is not None:
            assert self._tokenizer.eos_token_id is not None
            return self._tokenizer.eos_token_id
        return reply[position % len(reply)]

    def _reply_to(self, request: Request) -> list[int]:
        reply: Any = self.script.default
        if self._tokenizer is not None and self.script.replies:
            text = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            for key, own in self.script.replies.items():
                if key in text:
                    reply = own
        sample = int(request.request_id.partition("_")[0])
        if sample < len(self.script.samples):
            reply = self.script.samples[sample]
        if isinstance(reply, str):
            assert self._tokenizer is not None
            return self._tokenizer.encode(reply, add_special_tokens=False)
        ids = []
        for piece in reply:
            if isinstance(piece, str):
                assert self._tokenizer is not None
                token = self._tokenizer.backend.token_to_id(piece)
                assert token is not None, f"{piece!r} is no token: name it in special_pieces"
                ids.append(token)
            else:
                ids.append(int(piece))
        return ids


def _blank(rows: int) -> HostSamples:
    return HostSamples(
        tokens=np.zeros(rows, np.int32),
        status=np.zeros(rows, np.int32),
        rank=np.ones(rows, np.int32),
        logprob=np.zeros(rows, np.float32),
        top_ids=np.full((rows, TOP), -1, np.int32),
        top_logprobs=np.full((rows, TOP), -np.inf, np.float32),
    )


def scripted_engine(
    script: Script,
    config: EngineConfig | None = None,
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    default_params: SamplingParams | None = None,
) -> Engine:
    """A whole Engine over the script. Limits in the config, where given, win."""
    config = config or EngineConfig()
    num_blocks = config.num_gpu_blocks_override or num_blocks
    if isinstance(config.max_model_len, int):
        max_model_len = config.max_model_len
    max_num_seqs = config.max_num_seqs or max_num_seqs
    max_num_batched_tokens = config.max_num_batched_tokens or max_num_batched_tokens
    tokenizer = None if config.skip_tokenizer_init else script.make_tokenizer()
    runner: Any = ScriptedRunner(
        script,
        tokenizer,
        choose_buckets(max_num_seqs, max_num_batched_tokens),
        max_num_seqs,
        max_model_len,
        block_size,
        script.vocab_size,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
        )
    )
    eos = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    limits = Limits(
        vocab_size=script.vocab_size,
        max_model_len=max_model_len,
        max_logprobs=TOP,
        eos_token_ids=eos,
        num_candidates=num_candidates(max_num_seqs, script.vocab_size),
    )
    return Engine(
        scheduler,
        runner,
        Intake(limits, tokenizer, config.seed),
        default_params or SamplingParams(),
        async_scheduling=config.async_scheduling,
        check_integrity=True,
        eager=False,
    )


def scripted_async_engine(
    script: Script,
    config: EngineConfig | None = None,
    *,
    max_queued_requests: int | None = None,
    max_queued_tokens: int | None = None,
    load_gate: threading.Event | None = None,
    **limits: Any,
) -> AsyncEngine:
    """Not started. `load_gate` keeps it loading until it is set."""

    def build(config: EngineConfig, progress: Progress) -> Engine:
        if load_gate is not None:
            progress(1, 8, "decode[8]")
            assert load_gate.wait(60), "the load gate was never opened"
        return scripted_engine(script, config, **limits)

    return AsyncEngine(
        config or EngineConfig(),
        build=build,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
    )


@asynccontextmanager
async def running(
    script: Script | None = None, config: EngineConfig | None = None, **options: Any
) -> AsyncIterator[AsyncEngine]:
    """A started and loaded AsyncEngine, closed at the end."""
    engine = scripted_async_engine(script or Script(), config, **options)
    engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def settled(engine: AsyncEngine, seconds: float = 10.0) -> None:
    """Wait until nothing runs, and prove that nothing was left behind."""
    deadline = time.monotonic() + seconds

    def left(engine: Engine) -> tuple[int, int, int]:
        scheduler = engine.scheduler
        scheduler.check_integrity()
        return scheduler.num_running, scheduler.num_waiting, scheduler.kv.pool.num_held

    while True:
        found = await engine.call(left)
        if found == (0, 0, 0) and engine.num_unfinished == 0:
            return
        assert time.monotonic() < deadline, f"running, waiting, blocks held: {found}"
        await asyncio.sleep(0.002)
