"""What the engine needs to know of a model's dimensions, and how they are cut over a mesh."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from jaxpaged.errors import ConfigError
from jaxpaged.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the cache of one layer.

    `heads` x `key_dim` keys; values of `value_dim`, or, where `latent`, values that are the first
    `value_dim` elements of the key and not stored again (multi-head latent attention).
    """

    heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def elements(self) -> int:
        return self.heads * (self.key_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer. Families add fields in subclasses."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Of the checkpoint. The cache may hold copies: see `kv_repeat`."""
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    windows: tuple[int | None, ...] = ()
    """Attention window of each layer in tokens, None for all; () is no window anywhere."""
    attention_cap: float | None = None
    """Attention scores are bent to stay within this; None leaves them."""
    tensor_parallel: int = 1
    """Devices that heads, MLP width, experts and vocabulary are cut over."""

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.num_layers

    @property
    def kv_repeat(self) -> int:
        """Copies of each KV head: with more devices than KV heads, several hold the same."""
        return max(1, self.tensor_parallel // self.num_kv_heads)

    @property
    def kv_shape(self) -> KVShape:
        """Over all devices, copies included."""
        return KVShape(self.num_kv_heads * self.kv_repeat, self.head_dim, self.head_dim)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head on a device."""
        return self.num_heads // self.kv_shape.heads

    def padded(self, size: int) -> int:
        """`size` rounded up to a multiple of the devices; what is added is zero and unused."""
        return -(-size // self.tensor_parallel) * self.tensor_parallel

    def splits_into(self, devices: int) -> bool:
        """True if the heads can be cut over this many devices."""
        if self.num_kv_heads % devices == 0:
            return True
        group = self.num_heads // self.num_kv_heads
        return devices % self.num_kv_heads == 0 and group % (devices // self.num_kv_heads) == 0

    def over(self, devices: int) -> Self:
        """The same model cut over `devices`.

        Raises `ConfigError` with the sizes that work if the heads cannot be cut so.
        """
        if not self.splits_into(devices):
            sizes = [n for n in range(1, self.num_heads + 1) if self.splits_into(n)]
            raise ConfigError(
                f"tensor_parallel_size={devices} does not divide this model's {self.num_heads} "
                f"query and {self.num_kv_heads} KV heads; sizes that work: "
                f"{', '.join(map(str, sizes))}."
            )
        return dataclasses.replace(self, tensor_parallel=devices)
