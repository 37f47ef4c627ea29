"""OpenVINO GenAI: its pipeline with continuous batching and prefix caching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers.engines import Setup, SteppedEngine
from peers.workload import Request

BLOCK = 32
"""Tokens in a block of its KV cache on CPUs."""


class OpenVINO(SteppedEngine):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import numpy as np
        import openvino
        import openvino_genai

        sizes = setup.sizes
        limits = openvino_genai.SchedulerConfig()
        # Its cache_size is in whole GB.
        limits.num_kv_blocks = max(1, sizes.kv_bytes // (BLOCK * setup.kv_bytes_per_token()))
        limits.max_num_seqs = sizes.max_num_seqs
        limits.max_num_batched_tokens = sizes.max_num_batched_tokens
        limits.dynamic_split_fuse = True
        limits.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            # Its default is 8 bits; all engines keep their KV in bfloat16 here.
            "KV_CACHE_PRECISION": "bf16",
        }
        self._np, self._openvino, self._genai = np, openvino, openvino_genai
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(setup.model), limits, "CPU", properties
        )
        self._handles: dict[int, Any] = {}

    def versions(self) -> dict[str, str]:
        return {
            "openvino-genai": self._genai.__version__,
            "openvino": self._openvino.__version__,
        }

    def add(self, key: int, request: Request) -> None:
        settings = self._genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = request.output
        settings.ignore_eos = True
        settings.do_sample = False
        ids = self._openvino.Tensor(self._np.array([request.prompt], dtype=self._np.int64))
        self._handles[key] = self._pipeline.add_request(key, ids, settings)

    def step(self) -> Iterator[tuple[int, list[int]]]:
        self._pipeline.step()
        running = self._genai.GenerationStatus.RUNNING
        ended = [key for key, handle in self._handles.items() if handle.get_status() != running]
        for key in ended:
            (answer,) = self._handles.pop(key).read_all()
            yield key, list(answer.generated_ids)

    def close(self) -> None:
        self._handles.clear()
        del self._pipeline
