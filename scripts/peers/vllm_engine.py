"""vLLM for CPUs, stepped in the process that measures."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.engines import Setup, SteppedEngine
from peers.workload import Request


class VLLM(SteppedEngine):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sizes = setup.sizes
        self._params, self._kind = SamplingParams, RequestOutputKind.FINAL_ONLY
        self._engine: Any = LLM(
            str(setup.model),
            dtype="bfloat16",
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            kv_cache_memory_bytes=sizes.kv_bytes,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine

    @staticmethod
    def environment(python: Path, cache: Path) -> dict[str, str]:
        # What its installation guide asks for: Intel's OpenMP, which comes with its requirements,
        # and tcmalloc, which is the system's.
        wanted = [str(path) for path in (python.parent.parent / "lib").glob("libiomp5.so")]
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
        if tcmalloc:
            wanted.append(tcmalloc)
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "LD_PRELOAD": ":".join(wanted),
        }

    def versions(self) -> dict[str, str]:
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def add(self, key: int, request: Request) -> None:
        params = self._params(
            temperature=0,
            max_tokens=request.output,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._kind,
        )
        self._engine.add_request(str(key), {"prompt_token_ids": request.prompt}, params)

    def step(self) -> Iterator[tuple[int, list[int]]]:
        for output in self._engine.step():
            if output.finished:
                yield int(output.request_id), list(output.outputs[0].token_ids)

    def facts(self) -> dict[str, Any]:
        import torch

        preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":")]
        return {"threads": torch.get_num_threads(), "preloaded": preloaded}
