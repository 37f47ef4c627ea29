"""The example of a training loop learns, and its trainer and engine agree all the way."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "grpo.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_reward_rises() -> None:
    grpo = load_example()
    assert grpo.MODEL["vocab_size"] % grpo.KINDS == 0
    # optax does not keep to the strict rules that our tests run under.
    with jax.numpy_dtype_promotion("standard"):
        history = list(grpo.learn(48, 0))
    first, last = (np.mean([p.reward for p in part]) for part in (history[:8], history[-4:]))
    assert first < 0.3 and last > 0.5, [p.reward for p in history]
    # Importance ratios of tokens just drawn: exp(trainer - engine) of equal weights.
    assert max(p.ratio_error for p in history) < 1e-4


def test_the_reward_is_what_it_says() -> None:
    grpo = load_example()
    prompt = [0, 0, 0, 7]  # ends with kind 3
    right = [(3 + 1 + i) % 4 + 4 * i for i in range(grpo.ANSWER_TOKENS)]
    wrong = [right[0], *[token + 1 for token in right[1:]]]
    found = grpo.rewards(np.array([prompt + right, prompt + wrong]))
    # Shifting all of them by one keeps every pair right but the first.
    assert found.tolist() == [1.0, 1.0 - 1.0 / grpo.ANSWER_TOKENS]
