"""Make the reference outputs that tests/e2e/test_parity_stored.py compares with.

    python -m scripts.make_reference [--only NAME ...]
    python -m scripts.make_reference --zoo [CASE ...]

Run it from the repository root, with torch installed and the embedded model fetched. For each
model (all of them, or those named) it lets transformers generate greedily on PyTorch, in float32
with eager attention, and writes tests/data/NAME_reference.json: prompts, token ids and the
logprob of each drawn token. Two correct float32 implementations may part where the best two
logits nearly tie, so a candidate prompt that meets a gap below MIN_GAP is left out. The embedded
model takes about two minutes.

With --zoo it writes tests/data/zoo/CASE.json for the cases of tests/zoo (all, or those named): the
config and tensors that transformers saves, and for each prompt the greedy tokens and the logprobs
of the prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxpaged.config import EngineConfig
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import resolve_source
from scripts.fetch_model import FILE
from tests.e2e import oracle
from tests.tiny_models import tiny_llama, tiny_mistral
from tests.zoo.case import STORED as ZOO
from tests.zoo.case import Case, all_cases, describe, write_case

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
MIN_GAP = 1e-3
"""Smallest difference between the best two logits; float32 rounding moves them by about 1e-4."""
MIN_ZOO_GAP = 2e-5
"""Of tiny models in float32: errors are about 1e-6."""
CHAT_PROMPTS = 32
CHAT_TOKENS = 64
TINY_PROMPTS = 8
TINY_TOKENS = 48

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "Name three uses of a paper clip.",
    "Give me a short recipe for pancakes.",
    "Translate 'good morning' into Spanish.",
    "How many legs does a spider have?",
    "What is 17 plus 25?",
    "Tell me a joke about a programmer.",
    "Which planet is the largest in our solar system?",
    "Summarise the story of Romeo and Juliet.",
    "What should I pack for a week in the mountains?",
    "Write a Python function that reverses a string.",
    "Why do leaves change colour in autumn?",
    "What is the difference between a virus and a bacterium?",
    "Suggest a name for a black cat.",
    "How do I boil an egg?",
    "Who painted the Mona Lisa?",
    "List the days of the week in German.",
    "What does 'carpe diem' mean?",
    "Describe the taste of a lemon to someone who has never eaten one.",
    "How far away is the Moon?",
    "Write the first line of a detective novel.",
    "What is photosynthesis?",
    "Give me three tips for sleeping better.",
    "Is a tomato a fruit or a vegetable?",
    "Explain recursion to a child.",
    "What is the boiling point of water at sea level?",
    "Schreibe einen Satz über den Regen.",
    "Convert 5 kilometres to miles.",
    "What makes a good leader?",
    "Name an animal that begins with the letter Q.",
    "How does a bicycle stay upright?",
    "Finish this sentence: The train was late, so",
    "Write a thank-you note to a neighbour.",
    "What is a prime number?",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Explain what an operating system does.",
    "Give an antonym of 'generous'.",
    "What would happen if the Earth stopped turning?",
    "你好！Please answer in English: how are you?",
    "Write an SQL query that counts the rows of a table named users.",
    "Tell me about the history of the bicycle in three sentences.",
    "What is the square root of 144?",
)


def reference(model: Any, prompt: list[int], count: int) -> dict[str, Any] | None:
    """Greedy tokens with their logprobs, or None if the best two logits come too close."""
    tokens, logits = oracle.greedy(model, prompt, count)
    best = np.sort(logits, axis=1)[:, -2:]
    if (best[:, 1] - best[:, 0]).min() < MIN_GAP:
        return None
    drawn = oracle.log_softmax(logits)[np.arange(count), tokens]
    return {
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "logprobs": [round(float(value), 5) for value in drawn],
    }


def chat_cases() -> Iterator[dict[str, Any]]:
    """The embedded model answers questions."""
    source = resolve_source(EngineConfig())
    tokenizer = load_tokenizer(source, EngineConfig())
    model = oracle.from_gguf(source.path)
    for question in QUESTIONS:
        prompt = tokenizer.encode_chat(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        case = reference(model, prompt, CHAT_TOKENS)
        if case is not None:
            yield {"question": question, **case}


def tiny_cases(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A random model continues random tokens; some prompts are longer than any window."""
    path = tiny_llama(folder) if name == "tiny_llama" else tiny_mistral(folder, sliding_window=8)
    model = oracle.from_folder(path)
    rng = random.Random(0)
    while True:
        prompt = [rng.randrange(3, 512) for _ in range(rng.choice((1, 7, 20, 33, 64, 79)))]
        case = reference(model, prompt, TINY_TOKENS)
        if case is not None:
            yield case


def write(name: str, model: str, cases: list[dict[str, Any]]) -> None:
    made_by = {"torch": torch.__version__, "transformers": transformers.__version__}
    head = json.dumps({"model": model, "made_by": made_by})[:-1]
    body = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    path = DATA / f"{name}_reference.json"
    path.write_text(f'{head}, "cases": [\n{body}\n]}}\n', encoding="utf-8")
    print(f"{path}: {len(cases)} cases, {path.stat().st_size / 1000:.0f} kB")


def make(name: str, folder: Path) -> None:
    if name == "smollm2":
        cases, count, model = chat_cases(), CHAT_PROMPTS, FILE
    else:
        cases, count, model = tiny_cases(name, folder), TINY_PROMPTS, name
    taken = list(islice(cases, count))
    if len(taken) < count:
        raise SystemExit(f"error: only {len(taken)} of {count} prompts are decided clearly.")
    write(name, model, taken)


def make_zoo(case: Case, folder: Path) -> None:
    model = oracle.from_folder(write_case(folder, case))
    outputs = []
    for prompt in case.prompt_ids():
        # First, as transformers' dynamic frequencies stay those of the longest sequence seen.
        scored = oracle.log_softmax(oracle.logits(model, prompt))[
            np.arange(len(prompt) - 1), prompt[1:]
        ]
        tokens, logits = oracle.greedy(model, prompt, case.count)
        best = np.sort(logits, axis=1)[:, -2:]
        gap = float((best[:, 1] - best[:, 0]).min())
        if gap < MIN_ZOO_GAP:
            raise SystemExit(f"error: {case.name}: two logits come within {gap:.1e}; change it.")
        outputs.append(
            {"token_ids": tokens, "prompt": [round(float(value), 5) for value in scored]}
        )
    about = {**describe(case), "outputs": outputs}
    ZOO.mkdir(exist_ok=True)
    path = ZOO / f"{case.name}.json"
    path.write_text(json.dumps(about, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(argv: list[str]) -> int:
    names = ("smollm2", "tiny_llama", "tiny_mistral")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--zoo", nargs="*", metavar="CASE")
    wanted = parser.parse_args(argv).zoo
    if wanted is not None:
        with tempfile.TemporaryDirectory(prefix="jaxpaged-reference-") as folder:
            for case in all_cases():
                if not wanted or case.name in wanted:
                    make_zoo(case, Path(folder) / case.name)
        return 0
    with tempfile.TemporaryDirectory(prefix="jaxpaged-reference-") as folder:
        for name in parser.parse_args(argv).only or names:
            make(name, Path(folder) / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
