"""This engine, through its public API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.engines import Setup, SteppedEngine
from peers.workload import Request

ROOT = Path(__file__).resolve().parent.parent.parent
"""What is measured is this checkout, installed or not."""


class JaxPaged(SteppedEngine):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from jaxpaged import LLM, SamplingParams

        sizes = setup.sizes
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "kv_cache_memory_bytes": sizes.kv_bytes,
            "disable_progress": True,
        }
        self._params = SamplingParams
        self._llm = LLM(str(setup.model), **(settings | setup.options))

    @staticmethod
    def environment(python: Path, cache: Path) -> dict[str, str]:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            "JAXPAGED_CACHE_DIR": str(cache),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }

    def versions(self) -> dict[str, str]:
        import jaxpaged

        return {
            "jaxpaged": jaxpaged.__version__,
            **{name: version(name) for name in ("jax", "jaxlib")},
        }

    def add(self, key: int, request: Request) -> None:
        params = self._params(
            temperature=0, max_tokens=request.output, ignore_eos=True, detokenize=False
        )
        self._llm.engine.add_request(str(key), request.prompt, params)

    def step(self) -> Iterator[tuple[int, list[int]]]:
        for output in self._llm.engine.step():
            if output.finished:
                yield int(output.request_id), list(output.outputs[0].token_ids)

    def facts(self) -> dict[str, Any]:
        stats = self._llm.stats()
        return {
            "options": {name: str(value) for name, value in self.setup.options.items()},
            "compiles_after_warmup": stats.compiles_after_warmup,
            "preemptions": stats.preemptions,
        }

    def close(self) -> None:
        self._llm.close()
