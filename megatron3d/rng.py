"""Random values by key: initial weights and dropout masks.

The one idea: a random value is a pure function of what it is for (seed, name, position in the global tensor, sample,
layer). There is no generator state, hence none to save, to keep apart between ranks, or to rewind for recomputation,
and no layout of the mesh can change a value. The order of samples is likewise keyed; it lives in data.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron3d.keys import key64

TILE = 256
"""Side of the square tiles in which initial values are drawn. Part of what a seed means: never change it."""

_LOW = 0xFFFFFFFF  # the low 32 bits


def init_normal(
    out: Tensor,
    *,
    box: tuple[tuple[int, int], ...],
    shape: tuple[int, ...],
    seed: int,
    name: str,
    std: float,
) -> None:
    """Fill `out` with the part `box` of the normal initial value of a whole parameter.

    `shape` is that of the global tensor (1-D or 2-D), `box` the (start, stop) per dim that `out` holds of it, on any
    device and in any dtype. The global tensor is made of tiles of 256 x 256, each drawn whole, contiguous, on the CPU
    and in fp32 from a key of (seed, name, tile row, tile column), so any two boxes agree where they overlap, and only
    the tiles that meet the box are drawn. A 1-D tensor is one row.
    """
    assert tuple(out.shape) == tuple(stop - start for start, stop in box), (name, out.shape, box)
    assert all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)), (name, box, shape)
    (top, bottom), (left, right) = box if len(box) == 2 else ((0, 1), *box)
    target = out.detach() if out.dim() == 2 else out.detach()[None]
    tile = torch.empty(TILE, TILE, dtype=torch.float32)
    for row, rows in _meet(top, bottom):
        for column, columns in _meet(left, right):
            # torch's CPU generator keeps 32 of the 64 bits: of a million tiles about a hundred pairs are twins.
            generator = torch.Generator().manual_seed(key64(seed, name, row, column))
            tile.normal_(0.0, std, generator=generator)
            target[_shift(rows, top), _shift(columns, left)] = tile[
                _shift(rows, row * TILE), _shift(columns, column * TILE)
            ]


def _meet(start: int, stop: int) -> list[tuple[int, slice]]:
    """The tiles that meet [start, stop) along one dim: index, and the common part in global positions."""
    tiles = range(start // TILE, -(-stop // TILE))
    return [(i, slice(max(start, i * TILE), min(stop, (i + 1) * TILE))) for i in tiles]


def _shift(part: slice, origin: int) -> slice:
    """The same part, counted from `origin`."""
    return slice(part.start - origin, part.stop - origin)


def dropout_mask(
    shape: tuple[int, int, int],
    *,
    seed: int,
    samples: Sequence[int],
    layer: int,
    site: int,
    first_row: int,
    keep: float,
    hidden: int,
    device: torch.device | str,
) -> Tensor:
    """Which elements of an activation (s, b, h) survive dropout: a bool tensor of that shape, True with rate `keep`.

    samples: the consumed-sample number of each of the b columns; layer and site (0..3) say which dropout this is;
    first_row: position of row 0 in the whole sequence, so that a shard of rows gets just those rows of the whole mask;
    hidden: width of a whole row, of which the shape's h columns are the first.
    Philox4x32-10 with counter (row * ceil(hidden / 4) + column // 4, sample low, sample high, layer * 4 + site) and the
    two halves of the seed as key; column % 4 picks the word. Integers only: CPU and GPU agree to the bit.
    """
    num_rows, _, num_columns = shape
    assert len(samples) == shape[1] and num_columns <= hidden and 0 <= site < 4, (shape, samples, hidden, site)
    rows = torch.arange(first_row, first_row + num_rows, device=device)
    quads = torch.arange(-(-num_columns // 4), device=device)
    counter = (
        (rows[:, None, None] * -(-hidden // 4) + quads) & _LOW,  # (s, 1, h/4)
        torch.tensor([sample & _LOW for sample in samples], device=device)[:, None],  # (b, 1)
        torch.tensor([sample >> 32 & _LOW for sample in samples], device=device)[:, None],  # (b, 1)
        torch.tensor((layer * 4 + site) & _LOW, device=device),
    )
    words = philox(counter, (seed & _LOW, seed >> 32 & _LOW))
    threshold = round(keep * 2**32)
    return torch.stack([word < threshold for word in words], dim=-1).flatten(-2)[..., :num_columns]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words per counter.

    Words are int64 tensors that hold 32-bit values and broadcast against each other. Products wrap modulo 2^64, which
    leaves their bits 32..63 in place, so a shift and a mask give the high word although int64 is signed.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (odd >> 32 & _LOW) ^ c1 ^ k0, odd & _LOW, (even >> 32 & _LOW) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
