"""Beam search inside the engine against the same search as a loop outside of it.

    python scripts/bench_beams.py [--widths 2 4 8] [--prompt 64] [--output 33] [--prompts 2]
                                  [--rounds 3] [--out FILE]

The loop outside does what vLLM's API layer does: for every token it asks the engine for one token
of each live beam, as a new request whose prompt is all tokens so far, with the logprobs of the
2 x width best. It profits from the prefix cache, which has the full blocks of every beam; what lies
in the last block is computed again, from 1 to block_size tokens a beam and step.

Both run on the same engine, in turns (A B A B), with new prompts of random token ids every round;
that their hypotheses are the same is asserted. `tokens` are those computed for each beam and step,
after the prompt; `time` is wall time, prompts included, the median over the rounds. Starting,
compiling and the first, unmeasured round of both do not count. The machine's noise is the error.
The last line of the output is JSON, which --out writes to a file as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from bench_report import provenance, publish

from jaxpaged import LLM, SamplingParams
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch, Candidates
from jaxpaged.outputs import RequestOutput

Hypotheses = list[tuple[list[int], float]]
"""Token ids and scores, best first."""


def step_until_idle(llm: LLM) -> dict[str, RequestOutput]:
    """The last output of each request."""
    outputs = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            outputs[output.request_id] = output
    return outputs


def search_inside(
    llm: LLM, prompts: Sequence[list[int]], params: BeamSearchParams
) -> list[Hypotheses]:
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, params)
    outputs = step_until_idle(llm)
    return [
        [(found.token_ids, found.score or 0.0) for found in outputs[str(index)].outputs]
        for index in range(len(prompts))
    ]


def search_outside(
    llm: LLM, prompts: Sequence[list[int]], params: BeamSearchParams
) -> list[Hypotheses]:
    limit = llm.engine.scheduler.config.max_model_len
    searches = [
        BeamSearch(params, eos_token_ids=(), prompt_len=len(prompt), max_model_len=limit)
        for prompt in prompts
    ]
    one = SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
    )
    live: dict[int, list[list[int]]] = {index: [prompt] for index, prompt in enumerate(prompts)}
    while live:
        for index, beams in live.items():
            for place, tokens in enumerate(beams):
                llm.engine.add_request(f"{index} {place}", tokens, one)
        outputs = step_until_idle(llm)
        going_on = {}
        for index, beams in live.items():
            shown = [_candidates(outputs[f"{index} {place}"]) for place in range(len(beams))]
            chosen = searches[index].advance(shown)
            if chosen:
                going_on[index] = [[*beams[place], token] for place, token in chosen]
        live = going_on
    return [
        [(found.token_ids, found.score) for found in search.hypotheses()] for search in searches
    ]


def _candidates(output: RequestOutput) -> Candidates:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    ranked = sorted(logprobs[0].items(), key=lambda item: (-item[1].logprob, item[0]))
    return Candidates([token for token, _ in ranked], [entry.logprob for _, entry in ranked])


def check_same(inside: Sequence[Hypotheses], outside: Sequence[Hypotheses]) -> None:
    """Raises `RuntimeError` if the two have found different hypotheses."""
    for index, (ours, theirs) in enumerate(zip(inside, outside, strict=True)):
        same = [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        if not same or not np.allclose([x for _, x in ours], [x for _, x in theirs], atol=1e-4):
            raise RuntimeError(f"prompt {index}: inside found {ours}, outside {theirs}")


def compare(llm: LLM, width: int, args: argparse.Namespace) -> dict[str, object]:
    """Both searches, in turns."""
    rng = np.random.default_rng([args.seed, width])
    params = BeamSearchParams(
        beam_width=width, max_tokens=args.output, ignore_eos=True, detokenize=False
    )
    vocabulary = llm.engine.intake.limits.vocab_size
    beam_steps = args.prompts * width * (args.output - 1)
    sides: dict[str, Callable[..., list[Hypotheses]]] = {
        "inside": search_inside,
        "outside": search_outside,
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    tokens: dict[str, list[float]] = {side: [] for side in sides}
    for measured in [False] + [True] * args.rounds:
        prompts = rng.integers(0, vocabulary, (args.prompts, args.prompt)).tolist()
        found = {}
        for side, search in sides.items():
            llm.reset_prefix_cache()
            before = llm.engine.scheduler.stats.scheduled_tokens
            start = time.perf_counter()
            found[side] = search(llm, prompts, params)
            if measured:
                seconds[side].append(time.perf_counter() - start)
                computed = llm.engine.scheduler.stats.scheduled_tokens - before
                tokens[side].append((computed - args.prompts * args.prompt) / beam_steps)
        check_same(found["inside"], found["outside"])
    time_of = {side: statistics.median(taken) for side, taken in seconds.items()}
    return {
        "tokens_per_beam_step": {side: statistics.mean(each) for side, each in tokens.items()},
        "seconds": {side: [round(x, 3) for x in taken] for side, taken in seconds.items()},
        "time_ratio": time_of["outside"] / time_of["inside"],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompts", type=int, default=2, help="searched at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=33, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    rows = args.prompts * max(args.widths)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        block_size=args.block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=max(256, rows * args.block_size),
        max_model_len=args.prompt + args.output,
        max_logprobs=2 * max(args.widths),
        enforce_eager=True,
        disable_progress=True,
    )
    report = provenance("beams", "bench_beams.py", argv)
    report["model"] = llm.config.model
    print(f"{'width':<8}{'tokens':>16}{'':>10}{'time, s':>16}{'':>10}{'ratio':>8}")
    print(f"{'':<8}{'inside':>16}{'outside':>10}{'inside':>16}{'outside':>10}")
    for width in args.widths:
        found = compare(llm, width, args)
        report[f"width {width}"] = found
        each, seconds = found["tokens_per_beam_step"], found["seconds"]
        assert isinstance(each, dict) and isinstance(seconds, dict)
        times = "".join(
            f"{statistics.median(seconds[side]):>{wide}.2f}"
            for side, wide in (("inside", 16), ("outside", 10))
        )
        print(
            f"{width:<8}{each['inside']:>16.2f}{each['outside']:>10.2f}{times}"
            f"{found['time_ratio']:>8.2f}",
            flush=True,
        )
    llm.close()
    print()
    publish(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
