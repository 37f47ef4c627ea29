"""Quantised blocks unpack to what their layout says, and slices touch no more than they need."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxpaged.weights.gguf_blocks import CHUNK, unpack
from jaxpaged.weights.gguf_file import BLOCKS, PLAIN_TYPES, GGUFFile
from jaxpaged.weights.gguf_reader import GGUFTensorReader

F = np.float32
Block = Callable[[bytes], list[np.float32]]

# The layouts below are those of ggml's block structs, one value at a time. `half` reads the 16-bit
# scales; everything is rounded to float32 where the C code does.


def half(block: bytes, at: int) -> np.float32:
    return F(struct.unpack_from("<e", block, at)[0])


def nibble(byte: int, upper: int) -> int:
    return byte >> 4 if upper else byte & 15


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_0(block: bytes) -> list[np.float32]:
    d = half(block, 0)
    return [d * F(nibble(block[2 + i % 16], i // 16) - 8) for i in range(32)]


def q4_1(block: bytes) -> list[np.float32]:
    d, m = half(block, 0), half(block, 2)
    return [d * F(nibble(block[4 + i % 16], i // 16)) + m for i in range(32)]


def _five_bits(block: bytes, at: int, i: int) -> int:
    """A 32-bit word of fifth bits, then 16 bytes of nibbles."""
    fifth = struct.unpack_from("<I", block, at)[0] >> i & 1
    return nibble(block[at + 4 + i % 16], i // 16) | fifth << 4


def q5_0(block: bytes) -> list[np.float32]:
    d = half(block, 0)
    return [d * F(_five_bits(block, 2, i) - 16) for i in range(32)]


def q5_1(block: bytes) -> list[np.float32]:
    d, m = half(block, 0), half(block, 2)
    return [d * F(_five_bits(block, 4, i)) + m for i in range(32)]


def q8_0(block: bytes) -> list[np.float32]:
    d = half(block, 0)
    return [d * F(signed(block[2 + i])) for i in range(32)]


def q2_k(block: bytes) -> list[np.float32]:
    """scales[16], qs[64], d, dmin: 16 groups of 16 with a 4-bit scale and a 4-bit minimum."""
    d, dmin = half(block, 80), half(block, 82)
    values = []
    for i in range(256):
        scale = block[i // 16]
        q = block[16 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        values.append(d * F(scale & 15) * F(q) - dmin * F(scale >> 4))
    return values


def q3_k(block: bytes) -> list[np.float32]:
    """hmask[32], qs[64], scales[12], d: 16 groups of 16; a third bit that subtracts if not set."""
    d = half(block, 108)
    values = []
    for i in range(256):
        group = i // 16
        low = nibble(block[96 + group % 8], group // 8)
        high = block[104 + group % 4] >> 2 * (group // 4) & 3
        scale = (low | high << 4) - 32
        q = block[32 + i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3
        if not block[i % 32] >> i // 32 & 1:
            q -= 4
        values.append(d * F(scale) * F(q))
    return values


def _k_scale(block: bytes, group: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of one of 8 groups, from 12 bytes at 4."""
    s = block[4:16]
    if group < 4:
        return s[group] & 63, s[group + 4] & 63
    scale = s[group + 4] & 15 | s[group - 4] >> 6 << 4
    return scale, s[group + 4] >> 4 | s[group] >> 6 << 4


def q4_k(block: bytes) -> list[np.float32]:
    """d, dmin, scales[12], qs[128]: 8 groups of 32; two groups share 32 bytes."""
    d, dmin = half(block, 0), half(block, 2)
    values = []
    for i in range(256):
        scale, minimum = _k_scale(block, i // 32)
        q = nibble(block[16 + i // 64 * 32 + i % 32], i // 32 % 2)
        values.append(d * F(scale) * F(q) - dmin * F(minimum))
    return values


def q5_k(block: bytes) -> list[np.float32]:
    """d, dmin, scales[12], qh[32], qs[128]: as Q4_K, with bit `group` of qh as the fifth."""
    d, dmin = half(block, 0), half(block, 2)
    values = []
    for i in range(256):
        group = i // 32
        scale, minimum = _k_scale(block, group)
        q = nibble(block[48 + i // 64 * 32 + i % 32], group % 2)
        q += 16 * (block[16 + i % 32] >> group & 1)
        values.append(d * F(scale) * F(q) - dmin * F(minimum))
    return values


def q6_k(block: bytes) -> list[np.float32]:
    """ql[128], qh[64], scales[16] (signed bytes), d: 16 groups of 16."""
    d = half(block, 208)
    values = []
    for i in range(256):
        part, j = divmod(i, 128)
        low = nibble(block[64 * part + j % 64], j // 64)
        high = block[128 + 32 * part + j % 32] >> 2 * (j // 32) & 3
        values.append(d * F(signed(block[192 + i // 16])) * F((low | high << 4) - 32))
    return values


# The 16 levels of the non-linear 4-bit types.
LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def iq4_nl(block: bytes) -> list[np.float32]:
    d = half(block, 0)
    return [d * F(LEVELS[nibble(block[2 + i % 16], i // 16)]) for i in range(32)]


def iq4_xs(block: bytes) -> list[np.float32]:
    """d, scales_h (16 bits), scales_l[4], qs[128]: 8 groups of 32 with 6-bit scales."""
    d, high = half(block, 0), struct.unpack_from("<H", block, 2)[0]
    values = []
    for i in range(256):
        group = i // 32
        scale = nibble(block[4 + group // 2], group % 2) | (high >> 2 * group & 3) << 4
        q = LEVELS[nibble(block[8 + 16 * group + i % 16], i % 32 // 16)]
        values.append(d * F(scale - 32) * F(q))
    return values


# type -> (its definition, where its 16-bit floats stand)
DEFINITIONS: dict[str, tuple[Block, tuple[int, ...]]] = {
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q5_0": (q5_0, (0,)),
    "Q5_1": (q5_1, (0, 2)),
    "Q8_0": (q8_0, (0,)),
    "Q2_K": (q2_k, (80, 82)),
    "Q3_K": (q3_k, (108,)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
    "IQ4_NL": (iq4_nl, (0,)),
    "IQ4_XS": (iq4_xs, (0,)),
}
# Types whose values come from tables of hundreds of entries: transformers has its own copy.
GRIDS: dict[str, tuple[int, ...]] = {
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_M": (),
}


def _random_rows(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes, but for the 16-bit floats, which are ordinary numbers. [rows, bytes]"""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * blocks, BLOCKS[kind][1]), np.uint8)
    places = DEFINITIONS[kind][1] if kind in DEFINITIONS else GRIDS[kind]
    for at in places:
        scales = rng.normal(0, 0.1, len(data)).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":  # its float is spread over the upper nibbles of the 4 words of scales
        value = rng.normal(0, 0.1, len(data)).astype(np.float16).view(np.uint16)
        words = np.ascontiguousarray(data[:, 48:56]).view(np.uint16)
        for i in range(4):
            words[:, i] = words[:, i] & 0x0FFF | (value >> 4 * i & 15) << 12
        data[:, 48:56] = words.view(np.uint8)
    return data.reshape(rows, -1)


def _file(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> GGUFTensorReader:
    """Tensors of raw rows, in a file that is a llama otherwise."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    for name, (kind, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFTensorReader(GGUFFile.open(path))


def test_every_readable_type_has_a_test() -> None:
    assert set(DEFINITIONS) | set(GRIDS) | set(PLAIN_TYPES) == set(BLOCKS)


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_values_follow_the_definition(tmp_path: Path, kind: str) -> None:
    rows = _random_rows(kind, rows=3, blocks=4)
    reader = _file(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": (kind, rows)})
    got = reader.read("model.layers.0.mlp.down_proj.weight")
    size = BLOCKS[kind][1]
    expected = [
        [
            value
            for at in range(0, row.size, size)
            for value in DEFINITIONS[kind][0](row[at : at + size].tobytes())
        ]
        for row in rows
    ]
    np.testing.assert_array_equal(got, np.array(expected, np.float32), strict=True)


@pytest.mark.parametrize("kind", GRIDS)
def test_values_equal_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers.integrations.gguf import dequant

    rows = _random_rows(kind, rows=4, blocks=16)
    got = unpack(rows, kind, slice(None), slice(None))
    number = gguf.GGMLQuantizationType[kind].value
    expected = dequant.dequantize(torch.from_numpy(rows.copy()).reshape(-1), number).numpy()
    assert np.isfinite(expected).all() and expected.std() > 0
    np.testing.assert_allclose(got.reshape(-1), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", BLOCKS)
def test_slices_equal_the_whole(tmp_path: Path, kind: str) -> None:
    """Plain and permuted matrices, and one expert's; cuts inside and across blocks."""
    if kind in PLAIN_TYPES:
        values = np.random.default_rng(1).normal(0, 1, (6 * 16, 1024)).astype(np.float32)
        rows = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
        rows = rows.view(np.uint8) if kind == "BF16" else rows
    else:
        rows = _random_rows(kind, rows=6 * 16, blocks=1024 // BLOCKS[kind][0])
    parts = {
        "blk.0.ffn_down.weight": (kind, rows),
        "blk.0.attn_q.weight": (kind, rows),
        "blk.0.ffn_up_exps.weight": (kind, rows.reshape(6, 16, -1)),
    }
    reader = _file(tmp_path / "m.gguf", parts)
    assert len(reader.names()) == 8
    whole = reader.read("model.layers.0.mlp.down_proj.weight")
    assert whole.shape == (96, 1024)
    for expert in range(6):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"
        np.testing.assert_array_equal(reader.read(name), whole[16 * expert : 16 * expert + 16])
    cuts = [(0, 1), (255, 257), (256, 512), (31, 32), (500, 1024), (1023, 1024), (5, 5)]
    for name in reader.names():
        whole = reader.read(name)
        for start, stop in cuts:
            for first in (slice(None), slice(3, 11), slice(15, 16), slice(4, 4)):
                cut = (first, slice(start, stop))
                np.testing.assert_array_equal(
                    reader.read_slice(name, cut), whole[cut], f"{name} {cut}", strict=True
                )
        np.testing.assert_array_equal(reader.read_slice(name, (slice(2, 9),)), whole[2:9])


def test_rows_of_all_lengths_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _random_rows("Q4_K", rows=7, blocks=5)
    whole = unpack(rows, "Q4_K", slice(None), slice(None))
    for chunk in (1, 256, 1280, 4000):
        monkeypatch.setattr("jaxpaged.weights.gguf_blocks.CHUNK", chunk)
        np.testing.assert_array_equal(unpack(rows, "Q4_K", slice(None), slice(None)), whole)
        order = np.array([6, 0, 3])
        np.testing.assert_array_equal(
            unpack(rows, "Q4_K", order, slice(300, 700)), whole[order, 300:700]
        )


@pytest.mark.parametrize("index", [(slice(None), slice(1000, 1128)), (slice(64, 80),)])
def test_a_slice_holds_no_more_than_itself_and_a_chunk(
    tmp_path: Path, index: tuple[slice, ...]
) -> None:
    rows = _random_rows("Q6_K", rows=4096, blocks=8)
    reader = _file(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": ("Q6_K", rows)})
    name = "model.layers.0.mlp.down_proj.weight"
    whole_bytes = 4096 * 2048 * 4
    del rows
    reader.read_slice(name, (slice(0, 1),))  # whatever is imported or set up once
    tracemalloc.start()
    got = reader.read_slice(name, index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got.nbytes < whole_bytes / 8
    assert peak < got.nbytes + 24 * CHUNK < whole_bytes / 2  # some arrays of a chunk at a time
