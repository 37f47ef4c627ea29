"""Quantised rows of a GGUF tensor -> float32, only the blocks that are asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from jaxpaged.weights.gguf_file import BLOCKS

Rows = slice | npt.NDArray[np.intp]

# Elements unpacked at a time. Large enough that numpy's cost per call vanishes, small enough that
# the temporaries stay in the cache (and host memory stays at the result plus a little more).
CHUNK = 2**16


def unpack(
    packed: npt.NDArray[np.uint8], type_name: str, rows: Rows, columns: slice
) -> npt.NDArray[np.float32]:
    """`dequantized[rows, columns]` of a matrix stored as `packed` [R, bytes of a row].

    Blocks outside the slice are not read. `columns` has step 1; `rows` may be an array of indices.
    """
    elements, size = BLOCKS[type_name]
    start, stop, _ = columns.indices(packed.shape[1] // size * elements)
    first, last = start // elements, -(-stop // elements)
    wanted = packed[:, first * size : last * size]
    if isinstance(rows, slice):
        wanted, rows = wanted[rows], np.arange(len(packed[rows]))
    out = np.empty((len(rows), max(0, stop - start)), np.float32)
    if out.size == 0:
        return out
    width = (last - first) * elements
    cut = slice(start - first * elements, stop - first * elements)
    step = max(1, CHUNK // width)
    kind = GGMLQuantizationType[type_name]
    for at in range(0, len(rows), step):
        part = wanted[rows[at : at + step]]
        # One long row: the library would otherwise unpack 16 rows at a time.
        out[at : at + step] = dequantize(part.reshape(1, -1), kind).reshape(-1, width)[:, cut]
    return out
