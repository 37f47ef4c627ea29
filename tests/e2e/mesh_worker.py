"""Runs engines in processes of their own: over several virtual CPU devices, or two at a time.

The number of devices has to be chosen before JAX starts, so tests hand over a list of jobs; each
names a function of this module and gives it arguments. Programs are compiled with less effort, as
most of their time goes into compiling.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
Job = tuple[str, dict[str, Any]]


def run_jobs(devices: int, jobs: list[Job], *, workers: int = 2, timeout: int = 1800) -> list[Any]:
    """The results of the jobs, from new processes that share them."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    workers = min(workers, len(jobs))
    results: list[Any] = [None] * len(jobs)
    end = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number in range(workers):
            work, out = Path(folder) / f"{number}.json", Path(folder) / f"{number}.pickle"
            work.write_text(json.dumps(jobs[number::workers]))
            log = Path(folder) / f"{number}.log"
            with log.open("w") as stream:
                run = subprocess.Popen(
                    [sys.executable, "-m", "tests.e2e.mesh_worker", str(work), str(out)],
                    env=environment,
                    cwd=ROOT,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            running.append((run, out, log))
        try:
            for number, (run, out, log) in enumerate(running):
                status = run.wait(timeout=max(1.0, end - time.monotonic()))
                assert status == 0, log.read_text()[-4000:]
                results[number::workers] = pickle.loads(out.read_bytes())
        finally:
            for run, _, _ in running:
                run.kill()
                run.wait()
    return results


def greedy(folder: str, prompts: list[list[int]], count: int, engine: dict[str, Any]) -> list[Any]:
    """Greedy outputs with logprobs of prompt and output."""
    from jaxpaged import SamplingParams
    from tests.e2e.support import small_llm

    params = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=5, prompt_logprobs=5
    )
    with small_llm(folder, **engine) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def tokens(
    folder: str, size: int, prompts: list[list[int]], count: int, engine: dict[str, Any]
) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    from jaxpaged import SamplingParams
    from tests.e2e.support import small_llm

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with small_llm(folder, tensor_parallel_size=size, **engine) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().compiles_after_warmup == 0
    return [output.outputs[0].token_ids for output in outputs]


def updated(folders: list[str], size: int, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """Greedy tokens with the first checkpoint's weights, and after swaps to the second's: from its
    folder, its tensors, a trainer's module, and after a sleep in host memory.
    """
    import numpy as np

    from jaxpaged import SamplingParams
    from jaxpaged.training import parameters
    from tests.e2e.support import small_llm

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with small_llm(folders[0], tensor_parallel_size=size) as llm:

        def tokens() -> list[list[int]]:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

        found: dict[str, Any] = {"before": tokens(), "after": []}
        llm.update_weights(folders[1])
        found["after"].append(tokens())
        module, tensors = llm.flax_model(), llm.checkpoint_tensors()
        host = {path: np.asarray(value) for path, value in parameters(module).items()}
        for source in (tensors, module, host):
            llm.update_weights(folders[0])
            llm.update_weights(source)
            if source is host:
                llm.sleep(weights=True)
                llm.wake()
            found["after"].append(tokens())
        found["compiles_after_warmup"] = llm.stats().compiles_after_warmup
    return found


def everything(folder: str, size: int, **settings: Any) -> dict[str, Any]:
    """Every sampling parameter at once, on a pool that is too small, twice (the second time from
    the prefix cache); and the collectives of the programs.
    """
    from jaxpaged import SamplingParams
    from tests.e2e.support import engine_over, small_llm

    several: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.3, "seed": 3, "min_p": 0.05, "logprobs": 0},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 5, "presence_penalty": 0.7, "min_tokens": 5},
        {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -100.0}, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 6, "allowed_token_ids": list(range(50, 300))},
        {"temperature": 0.0, "stop_token_ids": [5], "bad_words": ["the"], "n": 1},
    ]
    shared = list(range(20, 52))
    prompts = [[*shared, 60 + i, 61 + i] for i in range(len(several))]
    found: dict[str, Any] = {"tokens": [], "logprobs": []}
    with small_llm(folder, tensor_parallel_size=size, **settings) as llm:
        engine = engine_over(llm, num_blocks=40)
        for turn in range(2):
            for i, (prompt, params) in enumerate(zip(prompts, several, strict=True)):
                ask = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
                engine.add_request(f"{turn}-{i}", prompt, ask)
            done: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                done |= {output.request_id: output for output in engine.step() if output.finished}
            for i in range(len(several)):
                output = done[f"{turn}-{i}"]
                found["tokens"].append(output.outputs[0].token_ids)
                for entries in (output.outputs[0].logprobs, output.prompt_logprobs):
                    for entry in entries or []:
                        if entry is not None:
                            found["logprobs"] += [value.logprob for value in entry.values()]
        stats = engine.stats()
        found["preemptions"] = stats.preemptions
        found["hits"] = stats.prefix_hit_tokens
        found["compiles_after_warmup"] = stats.compiles_after_warmup
        found["collectives"] = [
            collectives(llm.engine.runner, 0),
            collectives(llm.engine.runner, 64),
        ]
        found["devices"] = sorted(
            {shard.device.id for shard in llm.engine.runner._weights.rest[0].addressable_shards}
        )
    return found


def collectives(runner: Any, prompt_tokens: int) -> list[list[Any]]:
    """[operation, result shape] of every collective in a step's program."""
    from jaxpaged.device.buckets import StepShape

    shape = StepShape(runner.buckets.max_rows, prompt_tokens)
    text = runner.programs.lower(str(shape)).compile()
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    pattern = rf"= \(?(\w+\[[\d,]*\]).*? ({names})(?:-start)?\("
    return [[name, shape] for shape, name in re.findall(pattern, text.as_text())]


def main() -> None:
    work, out = map(Path, sys.argv[1:])
    results = [globals()[name](**arguments) for name, arguments in json.loads(work.read_text())]
    out.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
