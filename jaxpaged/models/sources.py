"""Where a parameter comes from: how slices of it are made from slices of checkpoint tensors.

A device holds one slice of a parameter, cut along one axis; only the bytes of that slice are read.
Parameters may be larger than their tensors along a cut axis: the devices' shares must be equal, so
the rest is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxpaged.sharding import LogicalAxes

HostArray = npt.NDArray[np.generic]
Index = tuple[slice, ...]
ReadSlice = Callable[[str, Index], HostArray]
"""(tensor, index) -> that part of it. The index may be shorter than the shape."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A checkpoint tensor of this shape, or some of its leading rows where several parameters (or
    parts of one) were saved as one tensor.
    """

    name: str
    shape: tuple[int, ...]
    """Of the part that is meant."""
    first_row: int = 0
    total_rows: int | None = None
    """Rows of the whole tensor; None: `shape` is the whole."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.total_rows is None else (self.total_rows, *self.shape[1:])

    def read(self, read: ReadSlice, index: Index = ()) -> HostArray:
        """Part of the tensor, `index` counting from its first row; zeros beyond its end."""
        bounds = [
            part.indices(max(size, part.stop or 0))[:2]
            for part, size in zip(index, self.shape, strict=False)
        ]
        inside = [(a, min(b, size)) for (a, b), size in zip(bounds, self.shape, strict=False)]
        if any(a >= b for a, b in inside):
            shape = [b - a for a, b in bounds] + list(self.shape[len(bounds) :])
            return np.zeros(shape, np.float32)
        picks = [slice(a, b) for a, b in inside]
        if self.total_rows is not None:
            rows = picks[0] if picks else slice(0, self.shape[0])
            picks[:1] = [slice(rows.start + self.first_row, rows.stop + self.first_row)]
        found = read(self.name, tuple(picks))
        missing = [(0, b - stop) for (_, b), (_, stop) in zip(bounds, inside, strict=True)]
        if any(count for _, count in missing):
            missing += [(0, 0)] * (found.ndim - len(missing))
            found = np.pad(found, missing)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSource:
    """A parameter that is one tensor as it is, perhaps padded. Subclasses join several.

    `axes` are the parameter's logical axes; None is replicated. `instead` is where it comes from in
    checkpoints that were saved in another form.
    """

    tensors: tuple[Tensor, ...]
    axes: LogicalAxes | None = None
    instead: ParamSource | None = None

    def among(self, names: Collection[str]) -> ParamSource:
        """The form of the source in a checkpoint of these tensors."""
        other = self.instead
        found = other is not None and all(tensor.name in names for tensor in other.tensors)
        return other if other is not None and found else self

    def fill(self, out: HostArray, read: ReadSlice, shape: tuple[int, ...], index: Index) -> None:
        """Write the part `index` of the parameter of this whole shape into `out`, of the type and
        shape of that part. Tensors are read one at a time, so no more than one is held beside it.
        """
        (tensor,) = self.tensors
        out[...] = tensor.read(read, _whole(index, shape))

    def read(
        self,
        read: ReadSlice,
        shape: tuple[int, ...],
        index: Index = (),
        dtype: npt.DTypeLike = np.float32,
    ) -> HostArray:
        """The part `index` of the parameter of this whole shape, as a new array."""
        sizes = [part.stop - part.start for part in _whole(index, shape)]
        out = np.zeros(sizes, dtype)
        self.fill(out, read, shape, index)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(ParamSource):
    """Several tensors [I, ...] as one parameter [I, n, ...]: a slice of I takes all along."""

    def fill(self, out: HostArray, read: ReadSlice, shape: tuple[int, ...], index: Index) -> None:
        rows, which, *rest = _whole(index, shape)
        for place, tensor in enumerate(self.tensors[which]):
            out[:, place] = tensor.read(read, (rows, *rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatesThenUps(ParamSource):
    """One tensor [X, 2 I, E], for each expert its gate and then its up projection, as
    [X, I, 2, E].
    """

    def fill(self, out: HostArray, read: ReadSlice, shape: tuple[int, ...], index: Index) -> None:
        (tensor,), width = self.tensors, shape[1]
        experts, rows, which, columns = _whole(index, shape)
        for place, half in enumerate(range(which.start, which.stop)):
            start = half * width
            picked = slice(start + rows.start, start + rows.stop)
            out[:, :, place] = tensor.read(read, (experts, picked, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQKV(ParamSource):
    """The projections q [N H, ...], k and v [K H, ...] as [K r, G / r + 2, H, ...]: for each KV
    head its query heads, its K and its V. With `repeat` r > 1 a KV head stands r times, each with
    its share of the query heads.
    """

    repeat: int = 1

    def fill(self, out: HostArray, read: ReadSlice, shape: tuple[int, ...], index: Index) -> None:
        heads = _whole(index, shape)[0]
        assert out.shape[1:] == shape[1:], "only whole heads are cut out"
        group, dim = shape[1] - 2, shape[2]
        count = heads.stop - heads.start
        first, last = heads.start // self.repeat, -(-heads.stop // self.repeat)
        rows = (
            slice(heads.start * group * dim, heads.stop * group * dim),
            slice(first * dim, last * dim),
            slice(first * dim, last * dim),
        )
        q, k, v = self.tensors
        tail = shape[3:]
        copies = np.arange(heads.start, heads.stop) // self.repeat - first
        out[:, :group] = q.read(read, rows[:1]).reshape(count, group, dim, *tail)
        out[:, group] = k.read(read, rows[1:2]).reshape(-1, dim, *tail)[copies]
        out[:, group + 1] = v.read(read, rows[2:]).reshape(-1, dim, *tail)[copies]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked(ParamSource):
    """Parts of equal shape [...] as one parameter [X, ...], read one at a time: the experts of a
    layer. `parts` are sources of their own; those beyond their number are zero.
    """

    parts: tuple[ParamSource, ...]
    tensors: tuple[Tensor, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        every = tuple(tensor for part in self.parts for tensor in part.tensors)
        object.__setattr__(self, "tensors", every)

    def fill(self, out: HostArray, read: ReadSlice, shape: tuple[int, ...], index: Index) -> None:
        which, *rest = _whole(index, shape)
        for place, part in enumerate(self.parts[which]):
            part.fill(out[place], read, shape[1:], tuple(rest))
        out[len(self.parts[which]) :] = 0


def whole(
    name: str,
    shape: Sequence[int],
    axes: LogicalAxes | None = None,
    instead: ParamSource | None = None,
) -> ParamSource:
    """The source of a parameter that is one tensor of this shape."""
    return ParamSource(tensors=(Tensor(name, tuple(shape)),), axes=axes, instead=instead)


def under(prefix: str, sources: Mapping[str, ParamSource]) -> dict[str, ParamSource]:
    """The sources of a submodule, by their paths in the module that holds it as `prefix`."""
    return {f"{prefix}.{path}": source for path, source in sources.items()}


def _whole(index: Index, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index with a start and a stop on every axis."""
    given = (*index, *(slice(None),) * (len(shape) - len(index)))
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(given, shape, strict=True))
