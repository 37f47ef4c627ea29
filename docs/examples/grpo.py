"""A tiny GRPO loop on a CPU: a Flax policy, this engine for the rollouts, one process.

The task is to count in circles: there are four kinds of tokens (the id modulo 4), and a token earns
a point if its kind is the one after its predecessor's. The policy starts out random, so with a
quarter of the points, and only ever sees the mean of an answer. Each iteration

1. pushes the policy's weights into the engine,
2. draws a group of answers to each prompt (n samples a request, one prefill a prompt),
3. scores them, and turns scores into advantages within each group,
4. takes a few Adam steps on the clipped policy-gradient objective of GRPO (Shao et al., 2024).

    python docs/examples/grpo.py [--iterations 80] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpaged import LLM, SamplingParams
from jaxpaged.training import token_logprobs

KINDS, VOCAB = 4, 64
PROMPT_TOKENS, ANSWER_TOKENS = 4, 16
PROMPTS, GROUP = 8, 8  # of an iteration; answers to each prompt
STEPS, CLIP = 4, 0.2  # optimiser steps on one batch of rollouts; bound of the probability ratio
LEARNING_RATE = 1e-3

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Progress:
    """One iteration. `ratio_error` is how far trainer and engine are apart before the first step:
    the largest |p_trainer / p_engine - 1| of any drawn token.
    """

    iteration: int
    reward: float
    loss: float
    ratio_error: float


@dataclass(frozen=True)
class Rollouts:
    """A batch of B answers, each with its prompt."""

    tokens: jax.Array  # i32 [B, PROMPT_TOKENS + ANSWER_TOKENS]
    logprobs: jax.Array  # f32 [B, ANSWER_TOKENS]; of the policy that drew them, from the engine
    advantages: jax.Array  # f32 [B]
    reward: float  # mean of the batch


def make_engine(folder: Path) -> LLM:
    """An engine with random weights; the policy is made from it."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=PROMPTS * GROUP,
        max_num_batched_tokens=PROMPTS * GROUP,
        decode_buckets=(PROMPTS * GROUP,),
        prefill_buckets=(PROMPTS * GROUP,),
        num_gpu_blocks_override=PROMPTS * GROUP * 2 + 1,
        max_model_len=32,
        disable_progress=True,
    )


def rewards(tokens: np.ndarray) -> np.ndarray:
    """Share of an answer's tokens whose kind comes after that of the token before."""
    before, answer = tokens[:, PROMPT_TOKENS - 1 : -1], tokens[:, PROMPT_TOKENS:]
    return np.mean(answer % KINDS == (before + 1) % KINDS, axis=1)


def roll_out(llm: LLM, rng: np.random.Generator) -> Rollouts:
    """Answers to random prompts, with advantages normalised within each group."""
    params = SamplingParams(
        n=GROUP,
        temperature=1.0,
        max_tokens=ANSWER_TOKENS,
        logprobs=0,
        logprobs_mode="processed",  # of what is drawn from; at temperature 1 the same as "raw"
        detokenize=False,
        seed=int(rng.integers(2**63)),
    )
    prompts = rng.integers(0, VOCAB, (PROMPTS, PROMPT_TOKENS)).tolist()
    tokens, logprobs = [], []
    for output in llm.generate(prompts, params, use_tqdm=False):
        for answer in output.outputs:
            assert answer.logprobs is not None
            tokens.append(output.prompt_token_ids + answer.token_ids)
            drawn = zip(answer.logprobs, answer.token_ids, strict=True)
            logprobs.append([entry[token].logprob for entry, token in drawn])
    scores = rewards(np.array(tokens)).reshape(PROMPTS, GROUP)
    centred = scores - scores.mean(axis=1, keepdims=True)
    advantages = centred / (scores.std(axis=1, keepdims=True) + 1e-4)
    return Rollouts(
        jnp.array(tokens, jnp.int32),
        jnp.array(logprobs, jnp.float32),
        jnp.array(advantages.reshape(-1), jnp.float32),
        float(scores.mean()),
    )


def objective(
    policy: nnx.Module, tokens: jax.Array, old: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """GRPO's loss, and the probability ratios [B, ANSWER_TOKENS]."""
    new = token_logprobs(policy, tokens)[:, PROMPT_TOKENS - 1 :]
    ratio = jnp.exp(new - old)
    clipped = jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP)
    weight = advantages[:, None]
    return -jnp.mean(jnp.minimum(ratio * weight, clipped * weight)), ratio


@nnx.jit
def train_step(
    policy: nnx.Module,
    optimizer: nnx.Optimizer,
    tokens: jax.Array,
    old: jax.Array,
    advantages: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    gradient = nnx.value_and_grad(objective, has_aux=True)
    (loss, ratio), grads = gradient(policy, tokens, old, advantages)
    optimizer.update(policy, grads)
    return loss, jnp.max(jnp.abs(ratio - 1.0))


def learn(iterations: int, seed: int) -> Iterator[Progress]:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder, make_engine(Path(folder)) as llm:
        policy = llm.flax_model()
        optimizer = nnx.Optimizer(policy, optax.adam(LEARNING_RATE), wrt=nnx.Param)
        for iteration in range(iterations):
            llm.update_weights(policy)
            batch = roll_out(llm, rng)
            found = [
                train_step(policy, optimizer, batch.tokens, batch.logprobs, batch.advantages)
                for _ in range(STEPS)
            ]
            (loss, apart) = found[0]
            yield Progress(iteration, batch.reward, float(loss), float(apart))
        assert llm.stats().compiles_after_warmup == 0, "pushing weights compiles nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    for now in learn(arguments.iterations, arguments.seed):
        bar = "#" * round(40 * now.reward)
        print(
            f"{now.iteration:3d}  reward {now.reward:.3f}  ratio-1 {now.ratio_error:.1e}  "
            f"{time.perf_counter() - start:5.1f} s  {bar}"
        )


if __name__ == "__main__":
    main()
