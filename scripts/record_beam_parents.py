"""Record which beams real searches go on with, for scripts/bench_sharing.py.

    python scripts/record_beam_parents.py [--model ALIAS_OR_PATH] [--widths 2 4 6] [--tokens 256]
                                          [--questions 24] [--out FILE]

Asks the model (by default the one that is embedded) questions through its chat template, each with
a beam search of every width that ignores the end-of-sequence token, and writes the parents: for
every search and step one digit for each next live beam, in the order of the search, which is the
index of the beam that it descends from. Prints how many parents go on in a step, on average, and
how old the last common ancestor of all live beams is. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from bench_report import ROOT, provenance

from jaxpaged import LLM
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.observer import EngineObserver

DEFAULT_OUT = ROOT / "docs" / "benchmarks" / "sharing" / "beam_parents.json"
QUESTIONS = (
    "Why is the sky blue during the day and red in the evening?",
    "Write a short letter to a neighbour who plays loud music at night.",
    "Explain how a bicycle stays upright.",
    "Give me a recipe for lentil soup and say how long each step takes.",
    "What should I look at before I buy a used car?",
    "Summarise the story of a small town that builds its own railway.",
    "Write a Python function that counts the words of a text.",
    "How does a refrigerator keep food cold?",
    "List five ways to save water at home, with a sentence on each.",
    "Tell me about the life cycle of a butterfly.",
    "Write a poem about an old lighthouse.",
    "What is the difference between weather and climate?",
    "Plan a day in a city by the sea for a family with two children.",
    "How do I write a good job application?",
    "Explain what a hash table is to someone who has never programmed.",
    "Why do leaves change their colour in autumn?",
    "Write a dialogue between a baker and a customer who has lost a key.",
    "What are the advantages and drawbacks of working from home?",
    "How is paper made?",
    "Translate into French: the train leaves early in the morning.",
    "Describe how to repair a flat tyre, step by step.",
    "What makes bread rise?",
    "Give three arguments for and three against school uniforms.",
    "How did people tell the time before there were clocks?",
)


class Watcher(EngineObserver):
    """Keeps the parents of each search."""

    def __init__(self) -> None:
        self.steps: dict[str, list[str]] = {}

    def branched(self, request_id: str, continuations: Sequence[tuple[int, int]]) -> None:
        if continuations:
            digits = "".join(str(index) for index, _ in continuations)
            self.steps.setdefault(request_id, []).append(digits)


def ancestor_ages(steps: Sequence[str]) -> list[int]:
    """For each step the number of steps since all live beams were one."""
    ages = []
    for last, digits in enumerate(steps):
        lines = set(range(len(digits)))
        step = last
        while len(lines) > 1:
            lines = {int(steps[step][line]) for line in lines}
            step -= 1
        ages.append(last - step)
    return ages


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6], help="1..10 beams")
    parser.add_argument("--tokens", type=int, default=256, help="of each search")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args(argv)
    if not all(1 <= width <= 10 for width in args.widths):
        parser.error("a width must be 1..10, as each parent is written as one digit")
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.tokens + 128,
        enforce_eager=True,
        disable_progress=True,
    )
    watcher = Watcher()
    llm.engine.observer = watcher
    prompts = [
        llm.render_chat([{"role": "user", "content": question}])[1]
        for question in QUESTIONS[: args.questions]
    ]
    found: dict[str, list[str]] = {}
    summary: dict[str, dict[str, float]] = {}
    for width in args.widths:
        watcher.steps.clear()
        params = BeamSearchParams(
            beam_width=width, max_tokens=args.tokens + 1, ignore_eos=True, detokenize=False
        )
        for index, prompt in enumerate(prompts):
            llm.engine.add_request(f"{width}-{index}", prompt, params)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        searches = [watcher.steps[f"{width}-{index}"] for index in range(len(prompts))]
        found[str(width)] = [" ".join(steps) for steps in searches]
        parents = [len(set(digits)) for steps in searches for digits in steps[1:]]
        ages = [age for steps in searches for age in ancestor_ages(steps)[width:]]
        summary[str(width)] = {
            "mean_parents": round(mean(parents), 3),
            "mean_age": round(mean(ages), 2),
            "median_age": median(ages),
        }
        print(f"width {width}: {summary[str(width)]}", flush=True)
    report = provenance("beam_parents", "record_beam_parents.py", argv)
    report |= {
        "model": llm.config.model,
        "dtype": llm.engine.runner.dtype_name,
        "tokens": args.tokens,
        "summary": summary,
        "parents": found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    llm.close()
    print(json.dumps({"benchmark": "beam_parents", "out": str(args.out), "summary": summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
