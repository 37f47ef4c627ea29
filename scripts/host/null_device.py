"""The whole engine over a device that computes nothing.

Everything that the host does for a real device is done: the runner is the real one, with its
packing, its copies to the host and its result objects. Only what would run on the device is
missing: there are no weights and no pools, and the programs are plain functions that return at
once. Tokens are a hash of the request's seed, its sample and the position, so they
do not depend on preemptions or neighbours, as with a real model.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.device.beam_candidates import num_candidates
from jaxpaged.device.buckets import Buckets, StepShape, choose_buckets
from jaxpaged.device.compile_ledger import CompileLedger
from jaxpaged.device.packing import Layout
from jaxpaged.device.programs import copy_sizes
from jaxpaged.device.runner import Runner
from jaxpaged.device.sampling_state import INT_FIELDS
from jaxpaged.device.step import EngineState, StepOutput, Weights
from jaxpaged.engine import Engine
from jaxpaged.intake import Intake, Limits
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.pieces import byte_alphabet
from jaxpaged.text.tokenizer import Tokenizer

VOCAB = 49152
EOS = 0
FIRST_WORD = 2
"""Ids below are special; those from here on are drawn."""
MAX_LOGPROBS = 20
TILE = 64
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_SEED, _SAMPLE, _POSITION = (
    INT_FIELDS.index(name) for name in ("seed_lo", "sample_index", "position")
)


class Sizes(NamedTuple):
    """Limits of a null engine, in sequences, tokens and blocks."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    num_blocks: int = 65536
    block_size: int = 16
    watermark: float = 0.01


class NullArray:
    """What the host uses of a device array. Reading it waits until it is done."""

    def __init__(self, values: npt.NDArray[Any], done: float) -> None:
        self._values = values
        self._done = done

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._done

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        left = self._done - time.perf_counter() if self._done else 0.0
        if left > 0:
            time.sleep(left)
        return self._values


class NullPrograms:
    """Stands in for `ProgramSet`: the same calls, and nothing is compiled or computed."""

    def __init__(self, buckets: Buckets, limits: Limits, *, block_size: int, rows: int) -> None:
        self.ledger = CompileLedger()
        self.ledger.warm = True
        self.copy_sizes = copy_sizes(rows)
        self.names: list[str] = []
        self.seconds = 0.0
        """How long each step takes on the device."""
        self.num_steps = 0
        self._width = -(-limits.max_model_len // block_size)
        self._layouts: dict[StepShape, Layout] = {}
        self._free_at = 0.0
        """When the device has run all that it was given."""
        count = limits.num_candidates
        places = np.arange(buckets.max_rows)[:, None]
        ids = FIRST_WORD + (places * 131 + np.arange(count) * 17) % (VOCAB - FIRST_WORD)
        scores = -(1.0 + np.arange(count) / 4 + (places * 7 % 5) / 8)
        bits = scores.astype(np.float32).view(np.int32)
        self._beams = np.concatenate([ids.astype(np.int32), bits], axis=1)

    def layout(self, shape: StepShape) -> Layout:
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = Layout(shape, self._width, TILE)
        return layout

    def init(self) -> EngineState:
        slots: Any = None
        return EngineState([], slots)

    def admit(self, slots: Any, slot: Any, values: Any) -> Any:
        return slots

    def copy(self, kv: Any, blocks: Any) -> Any:
        return kv

    def step(
        self, weights: Weights, state: EngineState, ints: Any, floats: Any, layout: Layout
    ) -> tuple[EngineState, StepOutput]:
        self.num_steps += 1
        rows, tokens = layout.shape.rows, layout.shape.tokens
        sample = layout.split(ints)["sample"]
        samples = np.zeros((rows, 4 + 2 * MAX_LOGPROBS), np.int32)
        mixed = sample[_POSITION] * 7919 + sample[_SEED] % 65521 + sample[_SAMPLE] * 104729
        samples[:, 0] = FIRST_WORD + mixed % (VOCAB - FIRST_WORD)
        prompt = np.zeros((tokens, 4 + 2 * MAX_LOGPROBS), np.int32)
        done = 0.0
        if self.seconds:  # one step after the other, as on a device
            done = self._free_at = max(self._free_at, time.perf_counter()) + self.seconds
        arrays: Any = [NullArray(x, done) for x in (samples, prompt, self._beams[:rows])]
        return state, StepOutput(*arrays)


class NullRunner(Runner):
    """The real runner over `NullPrograms`."""

    alone = True
    dtype_name = cache_dtype_name = "float32"
    attention_backend = "null"
    deterministic = True
    num_devices = 1

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        # Not Runner's own, which takes a loaded model.
        self.buckets = choose_buckets(sizes.max_num_seqs, sizes.max_num_batched_tokens)
        programs: Any = NullPrograms(
            self.buckets, limits, block_size=sizes.block_size, rows=sizes.max_num_seqs
        )
        self.programs = programs
        self.ledger = programs.ledger
        self.max_num_seqs, self.max_model_len = sizes.max_num_seqs, sizes.max_model_len
        self.num_blocks = sizes.num_blocks
        self._weights = Weights([], [])
        self._state = programs.init()

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 0, "kv_cache": 0, "sampling_state": 0}


def null_tokenizer() -> Tokenizer:
    """Byte-level, with as many tokens as SmolLM2 has: the bytes, and words of 3 to 7 letters."""
    names = list(byte_alphabet())
    vocab = {"<eos>": 0, "<bos>": 1} | {name: 2 + i for i, name in enumerate(names)}
    letters = "etaoinshrdlu"
    number = 0
    while len(vocab) < VOCAB:
        number += 1
        rest, word = number, ""
        while rest:
            rest, digit = divmod(rest, len(letters))
            word += letters[digit]
        vocab.setdefault("\u0120" + word.rjust(3, "a"), len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<bos>")])
    special = {"eos_token": "<eos>", "bos_token": "<bos>"}
    return Tokenizer(backend, special_tokens=special, chat_templates={"default": CHAT_TEMPLATE})


def null_engine(
    sizes: Sizes = Sizes(),  # noqa: B008
    *,
    tokenizer: Tokenizer | None = None,
    policy: str = "fcfs",
) -> Engine:
    """An engine over a `NullRunner`; without a tokenizer it makes ids only."""
    fields = sizes._asdict()
    limits = Limits(
        vocab_size=VOCAB,
        max_model_len=sizes.max_model_len,
        max_logprobs=MAX_LOGPROBS,
        eos_token_ids=(EOS,),
        num_candidates=num_candidates(sizes.max_num_seqs, VOCAB),
    )
    return Engine(
        Scheduler(SchedulerConfig(**fields, policy=policy)),
        NullRunner(sizes, limits),
        Intake(limits, tokenizer, 0),
        SamplingParams(),
        async_scheduling=True,
        check_integrity=False,
        eager=False,
    )
