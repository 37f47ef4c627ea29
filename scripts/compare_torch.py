"""A model's numbers beside those of PyTorch transformers, prompt by prompt and layer by layer.

    python scripts/compare_torch.py --model M [--prompt TEXT | --prompt-ids 1,2,3] [--layers]
                                    [--max-tokens 32] [--dtype float32] [--out FILE.json] ...

Both read the same model (a folder, a GGUF file, a hub id that is here already) and the same
prompts. transformers runs in float32 with eager attention; jaxpaged in --dtype. Printed for each
prompt:

  logits      the largest difference over the vocabulary, at its worst position; its size counts in
              shares of torch's largest logit there, where that is above 1
  logprobs    the same of log-probabilities
  KL          of torch's distribution from ours, in nats, at its worst position
  top-1       positions where both have the same likeliest token
  perplexity  of the prompt, by either
  greedy      the tokens that both generate: ours from the engine, in steps over paged KV. Where
              they part, the gap between torch's best two logits tells a near tie from a bug

With --layers, over all prompts: hidden states after the embedding and after each layer, with the
largest difference, the largest relative to the norm, and the least cosine; and the first layer
whose error jumps, which is where to look.

The last line is the verdict. Exit status: 0 if all is equal within --tolerance, 1 if not, 2 if
nothing could be compared. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from compare_numbers import (
    NORMAL_IN_A_LAYER,
    CompareError,
    LayerError,
    Report,
    compare,
    faults,
    first_jump,
    worst_of,
)
from compare_sides import Torch, our_side

from jaxpaged.config import EngineConfig
from jaxpaged.errors import JaxpagedError
from jaxpaged.jobs import InputError, Job, jobs_from_jsonl, jobs_from_lines
from jaxpaged.weights.source import ModelSource, resolve_source

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a logit, as a share of the largest at its position."""
PICTURES = (".png", ".svg", ".pdf")
BLOCK_SIZE = 16
SHOWN = 70
"""Characters of a prompt."""
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who wrote down every ship that passed: its "
    "name, its flag, the hour, and the weather. One evening in 1897 a ship came by that",
)


def show(number: int, report: Report) -> None:
    ids = report.token_ids
    text = "token ids" if report.prompt is None else repr(report.prompt)
    if len(text) > SHOWN:
        text = text[: SHOWN - 3] + "..."
    print(f"prompt {number}: {text}, {len(ids)} tokens")

    def worst(values: list[float]) -> str:
        place = int(np.argmax(values))  # of NaN, too
        return f"{values[place]:.1e} at position {place}, mean {np.mean(values):.1e}"

    ours, torch = report.perplexity["ours"], report.perplexity["torch"]
    print(f"  logits      {worst(report.logit_error)}; {max(report.error):.1e} of the largest")
    print(f"  logprobs    {worst(report.logprob_error)}")
    print(f"  KL          {worst(report.kl)}")
    print(f"  top-1       {sum(report.top1)} of {len(ids)} positions agree")
    if ours is not None and torch is not None:
        print(f"  perplexity  {ours:.6g} jaxpaged, {torch:.6g} torch")
    count, one = len(report.greedy["ours"]), report.parting
    if count and one is None:
        print(f"  greedy      all {count} tokens equal")
    elif one is not None:
        kind = "a near tie" if one.near_tie else "not a tie"
        print(
            f"  greedy      token {one.index} of {count} is {one.ours}, torch has {one.torch}; "
            f"torch's best two logits are {one.gap:.1e} apart: {kind}"
        )


def show_layers(layers: Sequence[LayerError], bad: str | None) -> None:
    print(
        f"{'layer':<14}{'max abs':>10}{'relative':>10}{'1 - cosine':>12}   (worst of all prompts)"
    )
    for layer in layers:
        rest = max(0.0, 1 - layer.cosine)
        print(f"{layer.layer:<14}{layer.max_abs:>10.1e}{layer.relative:>10.1e}{rest:>12.1e}")
    if bad == "embedding":
        print("The embedding differs already: its table, its scale, or positions added to it.")
    elif bad is not None:
        print(f"Layer {bad} is the first whose error jumps; what enters it still agrees.")
    else:
        print("No layer's error jumps. If the logits differ by much more than the last layer, look")
        print("at the final norm, the head, and scales or caps of the logits.")


def short(value: float) -> str:
    """0.0001 -> 1e-4."""
    return np.format_float_scientific(value, trim="-", exp_digits=1)


def as_json(
    args: argparse.Namespace, reports: Sequence[Report], verdict: str, bad: str | None
) -> str:
    import jax
    import torch
    import transformers

    facts = {
        "model": args.model,
        "torch_model": args.torch_model or args.model,
        "dtype": args.dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "tolerance": args.tolerance,
        "versions": {m.__name__: m.__version__ for m in (jax, torch, transformers)},
        "equal": verdict.startswith("equal"),
        "verdict": verdict,
        "first_bad_layer": bad,
        "prompts": [asdict(report) for report in reports],
    }
    return json.dumps(finite(facts), indent=1) + "\n"


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, reports: Sequence[Report], title: str, *, layers: bool) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9 if layers else 6), layout="constrained")
    axes = figure.subplots(3 if layers else 2)
    least = 1e-12  # a logarithmic axis has no zero
    for number, report in enumerate(reports):
        label = f"prompt {number}"
        axes[0].semilogy(np.maximum(report.logit_error, least), ".-", label=label)
        axes[1].semilogy(np.maximum(report.kl, least), ".-", label=label)
        if layers:
            values = np.maximum([layer.relative for layer in report.layers], least)
            axes[2].semilogy(np.arange(len(values)) - 1, values, ".-", label=label)
    axes[0].set(title=title, xlabel="position", ylabel="largest logit error")
    axes[1].set(xlabel="position", ylabel="KL(torch || jaxpaged), nats")
    if layers:
        axes[2].set(xlabel="layer (-1: the embedding)", ylabel="relative hidden error")
        axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()
    figure.savefig(path)


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers separated by commas, such as 1,2,3, got {text!r}"
        ) from None


def bounded(kind: type, least: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not value >= least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return value

    return parse


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, .gguf file, hub id, or alias")
    parser.add_argument(
        "--torch-model",
        metavar="MODEL",
        help="another model for torch, such as the unquantised one",
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    given.add_argument(
        "--prompt-ids", action="append", type=token_ids, metavar="ID,ID,...", help="repeatable"
    )
    given.add_argument(
        "--prompts-file", metavar="FILE", help="a prompt a line; .jsonl as `jaxpaged generate`"
    )
    parser.add_argument("--max-tokens", type=bounded(int, 0), default=32, metavar="N")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--layers", action="store_true", help="compare hidden states, too")
    parser.add_argument(
        "--tolerance",
        type=bounded(float, 0),
        metavar="X",
        help="share of the largest logit (default: 1e-4 for float32, 5e-2 for bfloat16)",
    )
    parser.add_argument("--tensor-parallel-size", type=bounded(int, 1), metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="everything, as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="errors as a picture (.png, .svg)"
    )
    args = parser.parse_args(argv)
    if args.tolerance is None:
        args.tolerance = TOLERANCE[args.dtype]
    for path in (args.out, args.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder; give the name of a file")
    if args.plot is not None and args.plot.suffix.lower() not in PICTURES:
        parser.error(f"--plot {args.plot}: the name must end in one of {', '.join(PICTURES)}")
    return args


def check_packages(args: argparse.Namespace) -> None:
    """Before minutes of work are done in vain."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise CompareError(
            f"this needs PyTorch ({error}): `pip install torch`, its CPU build is enough."
        ) from error
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise CompareError(f"--plot: {error}: `pip install matplotlib`.") from error


def read_prompts(
    args: argparse.Namespace, config: EngineConfig, source: ModelSource
) -> list[tuple[str | None, list[int]]]:
    """(text, token ids) of each prompt."""
    from jaxpaged.text.tokenizer import load_tokenizer

    if args.prompt_ids:
        return [(None, ids) for ids in args.prompt_ids]
    texts = args.prompt or PROMPTS
    jobs = [Job(where=f"--prompt number {n}", prompt=t) for n, t in enumerate(texts, start=1)]
    if args.prompts_file:
        path = Path(args.prompts_file)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"--prompts-file {path}: {error.strerror}.") from error
        json_lines = path.suffix == ".jsonl"
        jobs = (
            jobs_from_jsonl(data, chat=False, params={})
            if json_lines
            else jobs_from_lines(data, chat=False)
        )
    if not jobs:
        raise InputError(f"--prompts-file {args.prompts_file} holds no prompts.")
    if all(job.prompt_token_ids is not None for job in jobs):
        return [(None, job.prompt_token_ids or []) for job in jobs]
    tokenizer = load_tokenizer(source, config)
    prompts: list[tuple[str | None, list[int]]] = []
    for job in jobs:
        text, ids = job.prompt, job.prompt_token_ids
        if job.messages is not None:
            text = tokenizer.apply_chat_template(job.messages)
            ids = tokenizer.encode(text, add_special_tokens=False)
        elif text is not None:
            ids = tokenizer.encode(text)
        if not ids:
            raise InputError(f"{job.where} has no tokens.")
        prompts.append((text, ids))
    return prompts


def run(args: argparse.Namespace) -> int:
    from jaxpaged.models.registry import supported_architectures

    check_packages(args)
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        block_size=BLOCK_SIZE,
        tensor_parallel_size=args.tensor_parallel_size,
        disable_progress=True,
    )
    source = resolve_source(config, supported_architectures=supported_architectures())
    prompts = read_prompts(args, config, source)
    torch_source = source
    if args.torch_model is not None:
        torch_source = resolve_source(EngineConfig(model=args.torch_model))
    ours = our_side(config, source, [ids for _, ids in prompts], args.max_tokens)
    torch = Torch(torch_source)
    reports = []
    for number, ((text, ids), mine) in enumerate(zip(prompts, ours, strict=True)):
        theirs = torch.run(ids, args.max_tokens)
        report = compare(
            text,
            ids,
            mine,
            theirs,
            tolerance=args.tolerance,
            with_layers=args.layers,
        )
        show(number, report)
        reports.append(report)
    layers = worst_of([report.layers for report in reports])
    bad = first_jump(layers, NORMAL_IN_A_LAYER[args.dtype])
    if args.layers:
        show_layers(layers, bad)
    found = faults(reports, args.tolerance)
    verdict = (
        f"DIFFERENT: first at {found[0]}" if found else f"equal within {short(args.tolerance)}"
    )
    if args.out is not None:
        args.out.write_text(as_json(args, reports, verdict, bad), encoding="utf-8")
    if args.plot is not None:
        plot(args.plot, reports, f"{args.model}: {verdict.partition(':')[0]}", layers=args.layers)
    print(verdict)
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return run(args)
    except (CompareError, JaxpagedError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
