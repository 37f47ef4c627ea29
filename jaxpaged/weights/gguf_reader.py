"""Tensors of a Llama-type GGUF file under their Hugging Face names."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.gguf_config import ROPE_FREQS
from jaxpaged.weights.gguf_file import GGUFFile, GGUFTensor

Array = npt.NDArray[np.generic]

_PLAIN: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None where there is none."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


class GGUFTensorReader:
    """A `TensorReader` over one GGUF file.

    llama.cpp stores the rows of each q and k head so that the two halves of the rotation interleave
    (row 2i+j holds Hugging Face's row j*D/2+i). Reading undoes that, on whole quantised rows.
    """

    def __init__(self, file: GGUFFile) -> None:
        """Raises `ModelLoadError` for tensors that have no place in a Llama."""
        self._file = file
        self._tensors: dict[str, GGUFTensor] = {}
        unknown = []
        for tensor in file.tensors.values():
            name = hf_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor
            elif tensor.name != ROPE_FREQS:  # already turned into rope_scaling of the config
                unknown.append(tensor.name)
        if unknown:
            raise ModelLoadError(
                f"{file.path} has {len(unknown)} tensors that a Llama does not use: "
                f"{', '.join(sorted(unknown)[:5])}."
            )
        heads = file.get("llama.attention.head_count")
        self._heads = {"attn_q": heads, "attn_k": file.get("llama.attention.head_count_kv", heads)}
        self._data: Array | None = np.asarray(np.memmap(file.path, np.uint8, mode="r"))

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype_name(self, name: str) -> str:
        kind = self._tensor(name).type_name
        return np.dtype(_PLAIN[kind]).name if kind in _PLAIN else kind

    def read(self, name: str) -> Array:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Array:
        tensor = self._tensor(name)
        assert self._data is not None, "the reader is closed"
        stop = tensor.offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes
        packed = self._data[tensor.offset : stop]
        plain = _PLAIN.get(tensor.type_name)
        if plain is not None:
            # 32-byte alignment is the format's rule but not its guarantee; jax wants aligned data.
            aligned: Array = np.require(packed.view(plain), requirements="A")
            rows = aligned.reshape(tensor.shape)
        else:
            rows = packed.reshape(*tensor.shape[:-1], tensor.row_bytes)
        order = self._row_order(tensor)
        first, rest = index[:1], index[1:]
        if tensor.type_name not in _PLAIN and len(tensor.shape) == 1:
            first, rest = (), index  # one packed row: slice it only after unpacking
        if order is not None:
            rows = rows[order[first[0]] if first else order]
        elif first:
            rows = rows[first]
        if plain is None:
            rows = dequantize(rows, GGMLQuantizationType[tensor.type_name])
        return rows[(slice(None), *rest) if first else rest]

    def close(self) -> None:
        self._data = None

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._file.path} has no tensor {name!r}.")
        return self._tensors[name]

    def _row_order(self, tensor: GGUFTensor) -> npt.NDArray[np.intp] | None:
        """For q and k: the stored row of each row that Hugging Face's layout wants."""
        part = tensor.name.split(".")[-2]
        if part not in self._heads:
            return None
        heads, rows = self._heads[part], tensor.shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise ModelLoadError(
                f"{self._file.path}: tensor {tensor.name!r} has {rows} rows, not {heads} "
                "heads of even size."
            )
        # [heads, D/2, 2] as stored -> [heads, 2, D/2] as wanted
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
