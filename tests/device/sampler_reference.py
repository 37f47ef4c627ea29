"""A float64 sampler in plain numpy, and the glue that runs the device sampler on requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxpaged.device import sampler
from jaxpaged.device.sampling_state import (
    FLOAT_FIELDS,
    INT_FIELDS,
    SampleRows,
    SlotState,
    SlotValues,
    pack_slot,
    row_fields,
    rows_from_packed,
)
from jaxpaged.sampling_params import SamplingParams

MAX_LEN = 700  # not a multiple of the chunk in which history is counted
MAX_LOGPROBS = 6
VOCAB = 503


@dataclass(frozen=True)
class Ask:
    """One row: logits and everything its request brings."""

    logits: np.ndarray  # f32[V]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt: Sequence[int] = (1, 2, 3)
    outputs: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    sample_index: int = 0


def packed_rows(
    fields: Sequence[dict[str, int | float]], num_rows: int, num_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Host arrays for `rows_from_packed`; rows without fields are padding that asks for a lot."""
    padding: dict[str, int | float] = dict.fromkeys(INT_FIELDS + FLOAT_FIELDS, 1)
    padding |= {"slot": num_slots, "flags": 255, "num_logprobs": 3, "top_k": 300, "top_p": 0.99}
    every = [*fields, *[padding] * (num_rows - len(fields))]
    ints = np.array([[row[name] for row in every] for name in INT_FIELDS], np.int32)
    floats = np.array([[row[name] for row in every] for name in FLOAT_FIELDS], np.float32)
    return ints, floats


def ask_fields(ask: Ask, slot: int) -> dict[str, int | float]:
    fields = row_fields(ask.params, ask.seed, vocab_size=len(ask.logits))
    values = dataclasses.asdict(fields)
    del values["min_tokens"]
    return values | {
        "slot": slot,
        "position": len(ask.prompt) + len(ask.outputs),
        "prompt_len": len(ask.prompt),
        "sample_index": ask.sample_index,
        "flags": fields.flags_after(len(ask.outputs)),
    }


def inputs(
    asks: Sequence[Ask], num_rows: int, slots: Sequence[int] | None = None, num_slots: int = 40
) -> tuple[np.ndarray, SlotState, np.ndarray, np.ndarray]:
    """Logits f32[num_rows, V], a slot state and packed rows. Unused slots hold strict rules."""
    vocab = len(asks[0].logits)
    slots = range(len(asks)) if slots is None else slots
    strict = pack_slot(
        SamplingParams(allowed_token_ids=[0], logit_bias={0: -100.0}),
        list(range(10)),
        [[t] for t in range(20)],
        [5] * MAX_LEN,
        MAX_LEN,
    )
    state: list[SlotValues] = [strict] * num_slots
    for slot, ask in zip(slots, asks, strict=True):
        known = [*ask.prompt, *ask.outputs]
        state[slot] = pack_slot(ask.params, ask.stop_ids, ask.bad_words, known, MAX_LEN)
    stacked = {
        f.name: np.stack([getattr(values, f.name) for values in state])
        for f in dataclasses.fields(SlotState)
    }
    logits = np.full((num_rows, vocab), np.nan, np.float32)  # padding rows hold garbage
    logits[: len(asks)] = [ask.logits for ask in asks]
    fields = [ask_fields(ask, slot) for slot, ask in zip(slots, asks, strict=True)]
    return logits, SlotState(**stacked), *packed_rows(fields, num_rows, num_slots)


@functools.partial(jax.jit, static_argnames=("valid_vocab", "max_logprobs"))
def sample_output(
    logits: jax.Array,
    state: SlotState,
    ints: jax.Array,
    floats: jax.Array,
    *,
    valid_vocab: int,
    max_logprobs: int = MAX_LOGPROBS,
) -> sampler.SampleOutput:
    rows = rows_from_packed(ints, floats)
    return sampler.sample(logits, state, rows, max_logprobs=max_logprobs, valid_vocab=valid_vocab)


def sample(
    asks: Sequence[Ask],
    *,
    num_rows: int = 8,
    slots: Sequence[int] | None = None,
    valid_vocab: int | None = None,
) -> sampler.HostSamples:
    """Run the device sampler; results of the padding rows are cut off."""
    valid_vocab = valid_vocab or len(asks[0].logits)
    args = inputs(asks, num_rows, slots)
    packed = np.asarray(sample_output(*args, valid_vocab=valid_vocab).packed)
    return sampler.unpack(packed[: len(asks)])


@jax.jit
def uniforms(rows: SampleRows) -> jax.Array:
    """The documented recipe, written a second time: key(seed), sample index if any, position."""

    def one(hi: jax.Array, lo: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jax.numpy.stack([hi, lo]), impl="threefry2x32")
        key = jax.lax.cond(index > 0, lambda k: jax.random.fold_in(k, index), lambda k: k, key)
        return jax.random.bits(jax.random.fold_in(key, position), dtype="uint32")

    words = (rows.seed_hi, rows.seed_lo, rows.sample_index, rows.position)
    return jax.vmap(one)(*(word.astype("uint32") for word in words))


def uniform_numbers(asks: Sequence[Ask], num_rows: int = 8) -> np.ndarray:
    rows = rows_from_packed(*inputs(asks, num_rows)[2:])
    return (np.asarray(uniforms(rows))[: len(asks)] >> 8) / 2.0**24


def processed(ask: Ask) -> np.ndarray:
    """Logits after the rules, float64."""
    x = ask.logits.astype(np.float64)
    params, outputs = ask.params, list(ask.outputs)
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(x), bool)
        allowed[params.allowed_token_ids] = True
        x[~allowed] = -np.inf
    for word in ask.bad_words if params.bad_words else ():
        start = list(word[:-1])
        if len(start) <= len(outputs) and outputs[len(outputs) - len(start) :] == start:
            x[word[-1]] = -np.inf
    if len(outputs) < params.min_tokens:
        x[list(ask.stop_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    r, f, p = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    for token in {*ask.prompt, *outputs}:
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(outputs):
        x[token] -= f * outputs.count(token) + p
    return x


def weights(x: np.ndarray, params: SamplingParams, *, top_p: float | None = None) -> np.ndarray:
    """Unnormalised weights after temperature, min_p, top_k and top_p; x is float64[V]."""
    top_p = params.top_p if top_p is None else top_p
    w = np.exp((x - x.max()) / params.temperature)
    keep = w >= params.min_p
    if 0 < params.top_k < len(x):
        keep &= x >= np.sort(x)[-params.top_k]
    w = np.where(keep, w, 0.0)
    if top_p < 1.0:
        order = np.argsort(-x, kind="stable")
        above = np.concatenate([[0.0], np.cumsum(w[order])[:-1]])
        cut = x[order][above < top_p * w.sum()].min()
        w = np.where(x >= cut, w, 0.0)
    return w


def acceptable(ask: Ask, uniform: float) -> set[int]:
    """The right token; several where float32 may rightly fall on either side of an edge."""
    x = processed(ask)
    if ask.params.greedy:
        return {int(np.argmax(x))}
    tokens = set()
    for top_p in {ask.params.top_p, *(ask.params.top_p * (1 + np.array([-2e-6, 2e-6])))}:
        w = weights(x, ask.params, top_p=min(top_p, 1.0))
        sums = np.cumsum(w)
        for shift in (-4e-6, 0.0, 4e-6):
            target = np.clip(uniform + shift, 0.0, 1.0) * sums[-1]
            found = int(np.argmax(sums > target)) if target < sums[-1] else np.nonzero(w)[0][-1]
            tokens.add(int(found))
    return tokens


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


def noise(seed: int, scale: float = 4.0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * scale


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 0.01},
    {"min_p": 0.02},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 300, "temperature": 2.0},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 1},
    {"top_p": 0.5},
    {"top_p": 0.9999, "temperature": 2.0},
    {"top_p": 0.97, "top_k": 200, "temperature": 2.0},
    {"top_p": 0.9, "top_k": 10, "min_p": 0.01},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"temperature": 0.0},
    {"allowed_token_ids": [5, 6, 7], "top_k": 2},
    {"logit_bias": {3: 100.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_p": 0.9},
    {"min_tokens": 3, "top_k": 5},
    {"bad_words": ["x"], "top_k": 3},
]


def mixed(n: int, vocab: int = VOCAB, *, scale: float = 3.0, step: float = 0.0) -> list[Ask]:
    """A row for each of SETTINGS; `step` > 0 rounds logits, which makes many ties."""
    asks = []
    for i, settings in enumerate(SETTINGS):
        x = noise(1000 * n + i, scale, vocab)
        if step:
            x = np.round(x / step) * np.float32(step)
        best = np.argsort(-x)[:3].tolist()
        asks.append(
            Ask(
                x,
                SamplingParams.from_dict({"logprobs": i % 7, **settings}),
                seed=n * 2**32 + i,
                outputs=best[: i % 3],
                stop_ids=best[:2],
                bad_words=[best[:1], best[1:]],
                sample_index=i % 3,
            )
        )
    return asks
