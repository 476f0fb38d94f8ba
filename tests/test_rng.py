"""Keyed random values: independent of the cut, of the device and of everything drawn before."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from megatron3d.keys import key64
from megatron3d.rng import TILE, dropout_mask, init_normal, philox

SHAPE = (TILE * 2 + 7, TILE + 130)


def normal(box: tuple[tuple[int, int], ...], dtype: torch.dtype = torch.float32, **changes: object) -> Tensor:
    settings = {"shape": SHAPE, "seed": 7, "name": "layers.0.mlp.down.weight", "std": 0.02} | changes
    out = torch.full([stop - start for start, stop in box], float("nan"), dtype=dtype)
    init_normal(out, box=box, **settings)
    return out


def whole(**changes: object) -> Tensor:
    return normal(tuple((0, size) for size in changes.get("shape", SHAPE)), **changes)


def test_keys_are_fixed_and_unambiguous() -> None:
    """The value is part of what a seed means: a change here changes every run."""
    assert key64(1234, "layers.0.attention.query.weight", 0, 1) == 0xDF72E0E5B970DF43
    keys = [key64(), key64(1), key64("1"), key64(1, 1), key64(11), key64("ab", "c"), key64("a", "bc"), key64("ab,c")]
    assert len(set(keys)) == len(keys) and all(0 <= key < 2**64 for key in keys)


def test_any_box_is_a_slice_of_the_whole() -> None:
    full, choose = whole(), random.Random(0)
    for _ in range(40):
        top, bottom = sorted(choose.sample(range(SHAPE[0] + 1), 2))
        left, right = sorted(choose.sample(range(SHAPE[1] + 1), 2))
        assert torch.equal(normal(((top, bottom), (left, right))), full[top:bottom, left:right])
    assert normal(((3, 3), (0, 5))).shape == (0, 5)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_not_copies_of_each_other(tp: int, dim: int) -> None:
    """NUM-12: tensor-parallel shards differ, and together they are the whole tensor of one process."""
    shape = (tp * 96, tp * 80)
    shards = []
    for rank in range(tp):
        box = [(0, shape[0]), (0, shape[1])]
        size = shape[dim] // tp
        box[dim] = (rank * size, (rank + 1) * size)
        shards.append(normal(tuple(box), shape=shape))
    assert torch.equal(torch.cat(shards, dim), whole(shape=shape))
    for one, other in itertools.combinations(shards, 2):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.05


def test_values_are_normal() -> None:
    values = whole(std=0.02) / 0.02
    n = values.numel() ** 0.5
    assert abs(values.mean()) < 4 / n and abs(values.square().mean() - 1) < 4 * 2**0.5 / n
    assert abs(values.pow(3).mean()) < 4 * 15**0.5 / n and abs(values.pow(4).mean() - 3) < 4 * 96**0.5 / n


def test_tiles_are_drawn_from_their_keys_and_are_independent() -> None:
    """Each tile by hand from the documented key; what a seed means must not move."""
    full = whole(shape=(2 * TILE, 2 * TILE))
    tiles = full.unfold(0, TILE, TILE).unfold(1, TILE, TILE)  # (tile row, tile column, TILE, TILE)
    for row, column in itertools.product(range(2), range(2)):
        generator = torch.Generator().manual_seed(key64(7, "layers.0.mlp.down.weight", row, column))
        assert torch.equal(tiles[row, column], torch.empty(TILE, TILE).normal_(0.0, 0.02, generator=generator))
    correlation = torch.corrcoef(tiles.reshape(4, -1)) - torch.eye(4)
    assert correlation.abs().max() < 4 / TILE


def test_name_seed_and_std_count_and_nothing_else_does() -> None:
    box = ((0, 20), (0, 30))
    torch.manual_seed(1)
    first = normal(box)
    torch.manual_seed(2)
    torch.randn(3)
    assert torch.equal(normal(box), first)
    assert torch.equal(normal(box, shape=(999, 31)), first)
    for change in ({"name": "layers.1.mlp.down.weight"}, {"seed": 8}):
        assert (normal(box, **change) != first).all()
    assert torch.allclose(normal(box, std=0.04), 2 * first)


def test_every_dtype_and_memory_layout_holds_the_same_values() -> None:
    box = ((250, 260), (100, 300))
    first = normal(box)
    assert torch.equal(normal(box, torch.float64), first.double())
    assert torch.equal(normal(box, torch.bfloat16), first.bfloat16())
    transposed = torch.empty(200, 10).t()
    init_normal(transposed, box=box, shape=SHAPE, seed=7, name="layers.0.mlp.down.weight", std=0.02)
    assert torch.equal(transposed, first)


def test_one_dim() -> None:
    full = whole(shape=(1000,))
    assert torch.equal(normal(((123, 901),), shape=(1000,)), full[123:901])


def test_a_box_outside_the_tensor_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        normal(((0, SHAPE[0] + 1), (0, 5)))
    with pytest.raises(AssertionError):
        init_normal(torch.empty(4, 5), box=((0, 4), (0, 6)), shape=SHAPE, seed=0, name="w", std=1.0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    """The three vectors that the authors of Philox publish with Random123."""
    words = philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def mask(shape: tuple[int, int, int], **changes: object) -> Tensor:
    settings = {"seed": 3, "samples": range(10, 10 + shape[1]), "layer": 2, "site": 1, "first_row": 0, "keep": 0.9}
    return dropout_mask(shape, **(settings | {"hidden": shape[2], "device": "cpu"} | changes))


@pytest.mark.parametrize("hidden", [64, 33, 3])
def test_a_shard_of_rows_or_samples_is_that_part_of_the_mask(hidden: int) -> None:
    full = mask((12, 3, hidden))
    assert full.dtype == torch.bool and full.shape == (12, 3, hidden)
    for first, stop in itertools.combinations(range(0, 13, 3), 2):
        assert torch.equal(mask((stop - first, 3, hidden), first_row=first), full[first:stop])
    for column in range(3):
        assert torch.equal(mask((12, 1, hidden), samples=[10 + column]), full[:, column : column + 1])
    assert torch.equal(mask((12, 3, hidden - 2), hidden=hidden), full[..., : hidden - 2])


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
def test_keep_rate(keep: float) -> None:
    drawn = mask((256, 4, 256), keep=keep)
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        rate = drawn.double().mean(dims)
        deviation = (keep * (1 - keep) * rate.numel() / drawn.numel()) ** 0.5
        assert (rate - keep).abs().max() < 5 * deviation
    assert mask((9, 1, 5), keep=1.0).all() and not mask((9, 1, 5), keep=0.0).any()


def test_every_part_of_the_key_counts() -> None:
    """Masks that differ in one part are independent: at keep 1/2 they agree on half of their elements."""
    shape = (64, 1, 256)
    changes = [
        {},
        {"seed": 4},
        {"seed": 3 + (1 << 32)},
        {"samples": [11]},
        {"samples": [10 + (1 << 32)]},
        {"layer": -1},
        {"layer": 3},
        {"site": 2},
        {"first_row": 64},
    ]
    masks = [mask(shape, keep=0.5, **change) for change in changes]
    for one, other in itertools.combinations(masks, 2):
        assert abs((one == other).double().mean() - 0.5) < 5 * 0.5 / one.numel() ** 0.5


def test_columns_and_rows_are_independent() -> None:
    drawn = mask((512, 1, 64), keep=0.5)[:, 0]
    for lag in range(1, 9):
        assert abs((drawn[:, lag:] == drawn[:, :-lag]).double().mean() - 0.5) < 0.02
        assert abs((drawn[lag:] == drawn[:-lag]).double().mean() - 0.5) < 0.02
    ragged = mask((4096, 1, 33), keep=0.5)[:, 0]  # the end of a row shares no counter with the start of the next
    assert abs((ragged[:-1, 32] == ragged[1:, 0]).double().mean() - 0.5) < 0.04


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_and_cpu_agree() -> None:
    assert torch.equal(mask((33, 2, 67), device="cuda").cpu(), mask((33, 2, 67)))
