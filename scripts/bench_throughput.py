"""Output tokens per second of the embedded model at several batch sizes, beside transformers.

    python scripts/bench_throughput.py [--dtype bfloat16] [--batch 1 8 32] [--prompt 128]
                                       [--output 64] [--rounds 3] [--no-transformers]

Each round gives both engines the same new prompts of random token ids (so nothing is cached), all
at once, and has every prompt answered with the same number of greedy tokens; the engines take turns
(A B A B). The time includes the prompts. transformers, where it is installed with torch, runs one
static batch on the same number of threads, which is its best case: equal lengths need no padding.
Printed are medians over the rounds and the ratio of jaxpaged to transformers; the last line is
JSON. Starting, loading and compiling are not counted. Run it alone: the machine's noise is the
error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.weights.source import resolve_source

Run = Callable[[list[list[int]], int], None]


def jaxpaged_runner(dtype: str, most: int, length: int) -> Run:
    llm = LLM(dtype=dtype, max_num_seqs=most, max_model_len=length, disable_progress=True)

    def run(prompts: list[list[int]], output: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        results = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == output for result in results)

    return run


def transformers_runner(dtype: str) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    file = resolve_source(EngineConfig()).path
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=getattr(torch, dtype)
    ).eval()

    def run(prompts: list[list[int]], output: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output,
                max_new_tokens=output,
                pad_token_id=0,
            )
        assert made.shape[1] == len(prompts[0]) + output

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()

    engines = {"jaxpaged": jaxpaged_runner(args.dtype, max(args.batch), args.prompt + args.output)}
    if not args.no_transformers and importlib.util.find_spec("torch") is not None:
        engines["transformers"] = transformers_runner(args.dtype)
    rng = np.random.default_rng(0)
    rates: dict[str, dict[int, list[float]]] = {n: {b: [] for b in args.batch} for n in engines}
    for turn in range(args.rounds + 1):
        for batch in args.batch:
            prompts = rng.integers(100, 49_000, (batch, args.prompt)).tolist()
            for name, run in engines.items():
                start = time.perf_counter()
                run(prompts, args.output)
                if turn:  # the first round warms up
                    rates[name][batch].append(batch * args.output / (time.perf_counter() - start))
    medians = {n: {b: statistics.median(r) for b, r in by.items()} for n, by in rates.items()}
    print(f"{'requests':>10}" + "".join(f"{name:>16}" for name in engines) + f"{'ratio':>10}")
    for batch in args.batch:
        cells = [medians[name][batch] for name in engines]
        ratio = f"{cells[0] / cells[1]:.2f}" if len(cells) > 1 else "-"
        print(f"{batch:>10}" + "".join(f"{cell:>10.1f} tok/s" for cell in cells) + f"{ratio:>10}")
    facts: dict[str, Any] = {
        "dtype": args.dtype,
        "prompt": args.prompt,
        "output": args.output,
        "rounds": args.rounds,
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, {platform.machine()}",
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "output_tokens_per_second": medians,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
