"""transformers: generate() on one padded batch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.engines import Engine, Setup
from peers.workload import Request


class Transformers(Engine):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(setup.threads)
        torch.set_num_interop_threads(1)
        self._torch = torch
        self._settings: Any = transformers.GenerationConfig
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(setup.model), dtype=torch.bfloat16, local_files_only=True
        ).eval()
        # What a request leaves open would come from there, such as the tokens that end an answer.
        self._model.generation_config = transformers.GenerationConfig()

    def versions(self) -> dict[str, str]:
        import transformers

        return {"transformers": transformers.__version__, "torch": self._torch.__version__}

    def run(self, requests: Sequence[Request], concurrency: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for begin in range(0, len(requests), concurrency):
            answers += self._batch(requests[begin : begin + concurrency])
        return answers

    def _batch(self, requests: Sequence[Request]) -> list[list[int]]:
        """All rows go on until the longest answer is complete; the rest of the others is lost."""
        torch = self._torch
        width = max(len(request.prompt) for request in requests)
        most = max(request.output for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        settings = self._settings(
            max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            made = self._model.generate(ids, attention_mask=mask, generation_config=settings)
        rows: list[list[int]] = made[:, width:].tolist()
        return [row[: request.output] for row, request in zip(rows, requests, strict=True)]
