"""What the handlers refuse, and that nothing out of range is read or written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.native import ops
from pallas_kernels.paged_kv import PagedKV, PrefillTiles
from tests.kernels.backends import backend

pytestmark = pytest.mark.skipif(backend("native") is None, reason="native kernels do not run here")

BLOCK_SIZE = 4


def f32(*shape: int) -> Any:
    return jnp.ones(shape, jnp.float32)


def i32(*values: Any) -> Any:
    return jnp.asarray(np.array(values, np.int32))


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a decode step of two rows that is right but for `changes`."""
    right = {
        "q": f32(2, 4, 8),
        "kv": PagedKV(f32(16, 2, 8), f32(16, 2, 8)),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "positions": i32(5, 0),
    }
    return right | changes


def decode(block_size: int = BLOCK_SIZE, value_dim: int | None = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {"block_size": block_size, "scale": 1.0, "value_dim": value_dim}
    return np.asarray(ops.paged_decode(**arguments(**changes), **settings))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": f32(2, 4)}, r"argument q has the shape \[2, 4\], expected \[any, any, any\]"),
        ({"q": f32(2, 3, 8)}, "q has 3 heads, which is no multiple of the 2 of kv.k"),
        ({"q": f32(2, 4, 9)}, "q has 9 elements a head, and kv.k 8"),
        ({"q": f32(3, 4, 8)}, "there are 2 positions, for 3 queries"),
        ({"positions": f32(2)}, "positions is of type float32, expected int32"),
        ({"positions": i32([0, 1])}, r"positions has the shape \[1, 2\]"),
        ({"block_tables": f32(2, 3)}, "block_tables is of type float32, expected int32"),
        ({"block_tables": i32([0, 1])}, "there are 2 positions, for 2 queries and 1 rows"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, "block_tables has the shape .* without"),
        ({"kv": PagedKV(f32(16, 2, 8), f32(15, 2, 8))}, r"kv.v has the shape \[15, 2, 8\]"),
        ({"kv": PagedKV(f32(16, 16), f32(16, 16))}, r"kv.k has the shape \[16, 16\]"),
        (
            {"kv": PagedKV(f32(16, 2, 8), None), "value_dim": 9},
            "value_dim is 9, and keys have only",
        ),
        ({"block_size": 5}, "16 slots, which are no blocks of block_size 5"),
        ({"block_size": 0}, "no blocks of block_size 0"),
    ],
)
def test_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        decode(**changes)
    np.testing.assert_allclose(decode(), 1, rtol=1e-6)  # the next call is served


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": jnp.ones((2, 4, 8), jnp.int32)}, "queries, keys and values of int32"),
        ({"kv": PagedKV(f32(16, 2, 8).astype(jnp.bfloat16), None), "value_dim": 8}, "bfloat16 for"),
        ({"kv": PagedKV(*[f32(16, 2, 8)] * 2, *[f32(16, 2)] * 2)}, "float32 with scales"),
    ],
)
def test_unsupported(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ops.Unsupported, match=said):
        decode(**changes)


TILES = {"row": (0, 1), "start": (0, 3), "length": (3, 2), "position": (2, 0)}


@pytest.mark.parametrize(
    ("changes", "count", "said"),
    [
        ({}, 3, "tiles.count is 3, and there are 2 tiles"),
        ({}, -1, "tiles.count is -1"),
        ({"start": (0, 2)}, 2, "tile 1 has start 2 and length 2, where tokens 3 to 5 are left"),
        ({"start": (-1, 3)}, 2, "tile 0 has start -1"),
        ({"length": (3, 4)}, 2, "tile 1 has start 3 and length 4"),
        ({"length": (-3, 2)}, 2, "tile 0 has start 0 and length -3"),
        ({"length": (3, 2, 1)}, 2, r"tiles.length has the shape \[3\], expected \[2\]"),
    ],
)
def test_tiles_refused(changes: dict[str, Any], count: int, said: str) -> None:
    def run(fields: dict[str, Any], count: int) -> Any:
        arrays = {name: i32(*values) for name, values in fields.items()}
        tiles = PrefillTiles(**arrays, token_tile=jnp.zeros(6, jnp.int32), count=jnp.int32(count))
        right = arguments()
        return np.asarray(
            ops.paged_prefill(
                *(f32(6, 4, 8), right["kv"], right["block_tables"], tiles),
                **{"tile": 4, "block_size": BLOCK_SIZE, "scale": 1.0},
            )
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        run(TILES | changes, count)
    out = run(TILES, 2)
    np.testing.assert_allclose(out[:5], 1, rtol=1e-6)
    assert (out[5] == 0).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": f32(3, 2, 9)}, r"argument k has the shape \[3, 2, 9\], expected \[any, 2, 8\]"),
        ({"v": f32(2, 2, 8)}, r"argument v has the shape \[2, 2, 8\], expected \[3, 2, 8\]"),
        ({"slots": i32(0, 1)}, r"argument slots has the shape \[2\], expected \[3\]"),
        ({"slots": f32(3)}, "slots is of type float32"),
        ({"v": f32(3, 2, 8).astype(jnp.bfloat16)}, "argument v is of type bfloat16"),
    ],
)
def test_writes_refused(changes: dict[str, Any], said: str) -> None:
    right = {"k": f32(3, 2, 8), "v": f32(3, 2, 8), "slots": i32(0, 1, 2)}
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.block_until_ready(ops.write_kv(arguments()["kv"], **right | changes))


@pytest.mark.parametrize("block", [-1, 4, 2**29, -(2**31), 2**31 - 1])
def test_blocks_that_do_not_exist_stay_within_the_pool(block: int) -> None:
    out = decode(block_tables=jnp.full((2, 3), block, jnp.int32))
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.parametrize("position", [12, 1000, 2**31 - 1])
def test_positions_beyond_the_table_end_with_it(position: int) -> None:
    kv = PagedKV(jnp.arange(256.0).reshape(16, 2, 8) / 100, jnp.arange(256.0).reshape(16, 2, 8))
    last = decode(kv=kv, positions=i32(11, 3))
    assert decode(kv=kv, positions=i32(position, 3)).tobytes() == last.tobytes()


def test_nothing_to_do() -> None:
    assert decode(positions=i32(-1, -5)).tolist() == np.zeros((2, 4, 8)).tolist()
    empty = decode(q=f32(0, 4, 8), positions=i32(), block_tables=jnp.zeros((1, 3), jnp.int32))
    assert empty.shape == (0, 4, 8)
