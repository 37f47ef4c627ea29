"""What an engine has to do to be measured, and which ones there are."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from peers.workload import Request, Sizes

OURS = "jaxpaged"
CLASSES = {
    "jaxpaged": ("peers.jaxpaged_engine", "JaxPaged"),
    "vllm": ("peers.vllm_engine", "VLLM"),
    "openvino": ("peers.openvino_engine", "OpenVINO"),
    "transformers": ("peers.transformers_engine", "Transformers"),
}
"""Module and class by name. The modules import what they measure only when an engine is made."""
BYTES = 2
"""Of a weight and of an element of the KV cache, both bfloat16."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is to be started."""

    model: Path
    """A folder of safetensors in bfloat16, or what the engine takes in its place."""
    hf_config: dict[str, Any]
    """The model's config.json."""
    threads: int
    sizes: Sizes
    options: dict[str, Any] = field(default_factory=dict)
    """More settings, by the engine's own names."""

    def kv_bytes_per_token(self) -> int:
        config = self.hf_config
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * BYTES * config["num_hidden_layers"] * heads * dim)


class Engine(ABC):
    """One that is loaded and ready. Answers are greedy, and no token ends them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @staticmethod
    def environment(python: Path, cache: Path) -> dict[str, str]:
        """Variables of its process, run by `python`; `cache` is a folder for what it keeps from one
        start to the next.
        """
        return {}

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of the packages that do the work."""

    @abstractmethod
    def run(self, requests: Sequence[Request], concurrency: int) -> list[list[int]]:
        """The new token ids of each request, with at most `concurrency` requests under way."""

    def facts(self) -> dict[str, Any]:
        """What it says of itself at the end."""
        return {}

    def close(self) -> None:
        return None


class SteppedEngine(Engine):
    """One that is given requests at any time and goes on by steps."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._added = 0

    @abstractmethod
    def add(self, key: int, request: Request) -> None: ...

    @abstractmethod
    def step(self) -> Iterable[tuple[int, list[int]]]:
        """Keys and answers of the requests that ended."""

    def run(self, requests: Sequence[Request], concurrency: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in requests]
        waiting = iter(range(len(requests)))
        running: dict[int, int] = {}
        while True:
            for index in islice(waiting, concurrency - len(running)):
                running[self._added] = index
                self.add(self._added, requests[index])
                self._added += 1
            if not running:
                return answers
            for key, answer in self.step():
                answers[running.pop(key)] = answer


def engine_class(name: str) -> type[Engine]:
    module, cls = CLASSES[name]
    found: type[Engine] = getattr(importlib.import_module(module), cls)
    return found
