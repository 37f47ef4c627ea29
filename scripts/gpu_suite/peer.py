"""transformers on the same device, models, prompts and lengths: the peer in PyTorch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from gpu_suite.context import Context
from gpu_suite.models import LLAMA_1B, LLAMA_8B, TINY, ModelShape
from gpu_suite.serving import Workload

WORKLOADS = (Workload(32, 512, 64), Workload(1, 128, 64))
COMPILED_NEEDS = 40.0
"""Seconds without which torch.compile is not begun."""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    options: dict[str, Any]
    compiles: bool


WAYS = (
    Way("dynamic cache", {}, False),
    Way(
        "static cache, not compiled",
        {"cache_implementation": "static", "disable_compile": True},
        False,
    ),
    Way("static cache, compiled", {"cache_implementation": "static"}, True),
)


def run(ctx: Context) -> None:
    try:
        import torch
        import transformers
    except ImportError as error:
        ctx.row("transformers", "skipped", reason=f"cannot be imported: {error}")
        return
    if not ctx.dry and not torch.cuda.is_available():
        ctx.row("transformers", "skipped", reason="torch sees no GPU")
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    ctx.row("versions", **versions)
    for shape in (TINY,) if ctx.dry else (LLAMA_8B, LLAMA_1B):
        if ctx.late(0.0 if ctx.dry else 10.0):
            ctx.skip(f"transformers {shape.name}")
            continue
        model = _model(shape, dry=ctx.dry)
        for way in WAYS[:2] if ctx.dry else WAYS:
            for work in (Workload(2, 8, 4),) if ctx.dry else WORKLOADS:
                _measure(ctx, model, shape, way, work)
        del model
        if not ctx.dry:
            torch.cuda.empty_cache()


def _model(shape: ModelShape, *, dry: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = shape.config()
    for name in ("architectures", "model_type", "torch_dtype"):
        del fields[name]
    config = LlamaConfig(**fields)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dry else torch.bfloat16)
    try:
        with torch.device("cpu" if dry else "cuda"):
            model: Any = LlamaForCausalLM(config)
            return model.eval()
    finally:
        torch.set_default_dtype(before)


def _measure(ctx: Context, model: Any, shape: ModelShape, way: Way, work: Workload) -> None:
    name = f"transformers {shape.name} {work.name}, {way.name}"
    if ctx.late(COMPILED_NEEDS if way.compiles and not ctx.dry else 0.0):
        ctx.skip(name)
        return
    try:
        _generate(model, shape, way, work)  # warms up, and compiles
        first = _generate(model, shape, way, Workload(work.requests, work.prompt, 1))
        seconds = _generate(model, shape, way, work)
    except Exception as error:
        ctx.fail(name, error)
        return
    ctx.row(
        name,
        tokens_per_s=work.requests * work.output / seconds,
        decode_tokens_per_s=work.requests * (work.output - 1) / max(seconds - first, 1e-9),
        first_token_s=first,
        seconds=seconds,
        requests=work.requests,
        prompt=work.prompt,
        output=work.output,
        model=shape.name,
        way=way.name,
    )


def _generate(model: Any, shape: ModelShape, way: Way, work: Workload) -> float:
    import torch

    ids = torch.randint(3, shape.vocab, (work.requests, work.prompt), device=model.device)
    _wait(model)
    start = time.monotonic()
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=work.output,
            max_new_tokens=work.output,
            pad_token_id=0,
            **way.options,
        )
    _wait(model)
    seconds = time.monotonic() - start
    if made.shape[1] != work.prompt + work.output:
        raise RuntimeError(f"{made.shape[1] - work.prompt} tokens came for {work.output}")
    return seconds


def _wait(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()
