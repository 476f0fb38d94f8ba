"""The reference kernels against torch's own operations and autograd, in fp64, fp32 and bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron3d import kernels

# Relative error of a whole tensor, ||a - b|| / ||b||.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(7,), (5, 3), (3, 131), (2, 3, 257), (4, 1, 2, 33)]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal shape, and ||actual - expected|| <= tolerance * ||expected||."""
    assert actual.shape == expected.shape
    gap = (actual.double() - expected.double()).norm()
    assert gap <= tolerance * expected.double().norm(), f"relative error {(gap / expected.double().norm()).item():.2e}"


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)


def by_autograd(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of a torch expression in fp64: the oracle that every pair is held against."""
    leaves = [x.detach().clone().double().requires_grad_() for x in inputs]
    y = function(*leaves)
    return y.detach(), list(torch.autograd.grad(y, leaves, dy.double()))


def check(
    actual: Sequence[Tensor], expected: Sequence[Tensor], dtypes: Sequence[torch.dtype], tolerance: float
) -> None:
    assert [x.dtype for x in actual] == list(dtypes)
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, dy = draw(*shape, dtype=dtype, scale=3, shift=0.5), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[-1], dtype=dtype, seed=2, shift=1)
    value, grads = by_autograd(lambda x, w: F.rms_norm(x, w.shape, w, 1e-2), dy, x, weight)
    y, rstd = kernels.rms_norm(x, weight, 1e-2)
    dx, dweight = kernels.rms_norm_backward(dy, x, weight, rstd)
    up = torch.promote_types(dtype, torch.float32)
    check((y, dx, dweight), (value, *grads), (dtype, dtype, up), TOLERANCE[dtype])
    assert rstd.shape == (*shape[:-1], 1) and rstd.dtype == up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, dy = draw(*shape, dtype=dtype, scale=3, shift=0.5), draw(*shape, dtype=dtype, seed=1)
    weight, bias = draw(shape[-1], dtype=dtype, seed=2, shift=1), draw(shape[-1], dtype=dtype, seed=3)
    value, grads = by_autograd(lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-2), dy, x, weight, bias)
    y, mean, rstd = kernels.layer_norm(x, weight, bias, 1e-2)
    dx, dweight, dbias = kernels.layer_norm_backward(dy, x, weight, mean, rstd)
    up = torch.promote_types(dtype, torch.float32)
    check((y, dx, dweight, dbias), (value, *grads), (dtype, dtype, up, up), TOLERANCE[dtype])
    assert mean.shape == rstd.shape == (*shape[:-1], 1) and mean.dtype == rstd.dtype == up


def test_layer_norm_keeps_its_digits_far_from_zero() -> None:
    """A mean of 1000 deviations: a variance computed as mean(x^2) - mean(x)^2 would have lost them."""
    x, ones = draw(4, 257, dtype=torch.float32, shift=1000), torch.ones(257)
    y, _, _ = kernels.layer_norm(x, ones, ones, 1e-5)
    assert_near(y, F.layer_norm(x.double(), (257,)) + 1, 1e-4)


def gelu_by_hand(x: Tensor, tanh: bool) -> Tensor:
    if tanh:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu(dtype: torch.dtype, tanh: bool) -> None:
    x, dy = draw(3, 5, 77, dtype=dtype, scale=3), draw(3, 5, 77, dtype=dtype, seed=1)
    value, grads = by_autograd(lambda x: gelu_by_hand(x, tanh), dy, x)
    actual = kernels.gelu(x, tanh=tanh), kernels.gelu_backward(dy, x, tanh=tanh)
    check(actual, (value, *grads), (dtype, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (3, 5, 86), (1, 176)])
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate_up = draw(*shape, dtype=dtype, scale=3)
    dy = draw(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)

    def by_hand(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., :half] * torch.sigmoid(x[..., :half]) * x[..., half:]

    value, grads = by_autograd(by_hand, dy, gate_up)
    actual = kernels.swiglu(gate_up), kernels.swiglu_backward(dy, gate_up)
    check(actual, (value, *grads), (dtype, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_a_complex_rotation(dtype: torch.dtype) -> None:
    x, dy = draw(9, 2, 3, 10, dtype=dtype), draw(9, 2, 3, 10, dtype=dtype, seed=1)
    positions = torch.arange(40, 49)
    up = torch.promote_types(dtype, torch.float32)
    cos, sin = kernels.rotary_tables(positions, 10, 100.0, dtype=up)
    angles = torch.tensor([[p * 100 ** (-i / 5) for i in range(5)] for p in range(40, 49)], dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)

    def by_hand(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :5], x[..., 5:]) * turn[:, None, None]
        return torch.cat((turned.real, turned.imag), dim=-1)

    value, grads = by_autograd(by_hand, dy, x)
    tolerance = TOLERANCE[dtype]
    check(
        (kernels.rotary(x, cos, sin), kernels.rotary_backward(dy, cos, sin)), (value, *grads), (dtype,) * 2, tolerance
    )


def test_rotary_tables_are_exact_to_a_rounding() -> None:
    """NUM-01: tables at positions 0..4095 against fp64 angles from Python's own math, in every dtype."""
    positions, dim, theta = torch.arange(4096), 64, 10000.0
    angles = [[p * theta ** (-2 * i / dim) for i in range(dim // 2)] for p in (0, 1, 7, 255, 2047, 2048, 4095)]
    expected = torch.tensor(angles, dtype=torch.float64)
    for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 1e-7), (torch.float64, 1e-11)):
        cos, sin = kernels.rotary_tables(positions, dim, theta, dtype=dtype)
        rows = torch.tensor([0, 1, 7, 255, 2047, 2048, 4095])
        assert cos.dtype == sin.dtype == dtype and cos.shape == sin.shape == (4096, dim // 2)
        assert (cos[rows].double() - expected.cos()).abs().max() < tolerance
        assert (sin[rows].double() - expected.sin()).abs().max() < tolerance


def test_rotary_tables_do_not_depend_on_the_shard() -> None:
    whole = kernels.rotary_tables(torch.arange(32), 16, 1e4)
    part = kernels.rotary_tables(torch.arange(8, 16), 16, 1e4)
    assert torch.equal(whole[0][8:16], part[0]) and torch.equal(whole[1][8:16], part[1])


def test_llama3_scaling_by_wavelength() -> None:
    """The three ranges of wavelength, written as Llama 3 states them."""
    dim, theta, scaling = 128, 500000.0, kernels.RotaryScaling(8.0, 1.0, 4.0, 8192)
    expected = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 8
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency)
    cos, sin = kernels.rotary_tables(torch.tensor([1]), dim, theta, scaling, torch.float64)
    assert_near(torch.atan2(sin, cos)[0], torch.tensor(expected, dtype=torch.float64), 1e-12)
    assert len({round(math.log(e), 9) for e in expected}) == dim // 2


VOCAB = 131


def shards_of(logits: Tensor, width: int) -> list[tuple[Tensor, int, int]]:
    """(local logits, first_id, num_valid) per shard of `width` columns; what is beyond the vocabulary holds rubbish."""
    shards = []
    for first in range(0, 4 * width, width):
        local = torch.full((len(logits), width), 1e4, dtype=logits.dtype)
        valid = max(0, min(width, VOCAB - first))
        local[:, :valid] = logits[:, first : first + valid]
        shards.append((local, first, valid))
    return shards


def sharded_loss(
    shards: list[tuple[Tensor, int, int]], labels: Tensor, dloss: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """loss, shares and the gradient of each shard, as the ranks of a tensor-parallel group compute them."""
    parts = [kernels.cross_entropy_local(local, labels, *where) for local, *where in shards]
    stats = torch.stack([local_stats for _, local_stats in parts])
    merged = [kernels.cross_entropy_merge(stats, labels, rank) for rank in range(len(shards))]
    assert all(torch.equal(loss, merged[0][0]) for loss, _ in merged)
    grads = [
        kernels.cross_entropy_backward(probabilities, labels, *where, share, dloss)
        for (probabilities, _), (_, *where), (_, share) in zip(parts, shards, merged, strict=True)
    ]
    return merged[0][0], torch.stack([share for _, share in merged]), grads


# Widths 33 and 40 leave padding in the last shard; 131 leaves three shards empty; 66 leaves two.
@pytest.mark.parametrize("width", [33, 40, 66, VOCAB, 150])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("targets", ["mixed", "first", "last", "ignored"])
def test_cross_entropy(width: int, dtype: torch.dtype, targets: str) -> None:
    """NUM-03, LOSS-03: targets in one shard only, mixed, and none at all; shards have the gradients of the whole."""
    logits, dloss = draw(17, VOCAB, dtype=dtype, scale=4), draw(17, dtype=torch.float64, seed=1)
    low, high = {"first": (0, 30), "last": (VOCAB - 30, VOCAB)}.get(targets, (0, VOCAB))
    labels = torch.randint(low, high, (17,), generator=torch.Generator().manual_seed(2))
    labels[torch.tensor([0, 5])] = torch.tensor([-100, -1])
    if targets == "ignored":
        labels.fill_(-1)

    def by_torch(x: Tensor) -> Tensor:
        return F.cross_entropy(x, labels.clamp(min=-1), ignore_index=-1, reduction="none")

    value, (expected,) = by_autograd(by_torch, dloss, logits)
    up = torch.promote_types(dtype, torch.float32)
    shards = shards_of(logits, width)
    loss, shares, grads = sharded_loss(shards, labels, dloss.to(up))
    gathered = torch.cat(grads, dim=1)
    check((loss, gathered[:, :VOCAB]), (value, expected), (up, up), TOLERANCE[dtype])
    assert_near(shares.sum(0), torch.ones(17), TOLERANCE[up])
    assert not gathered[:, VOCAB:].any() and not gathered[labels < 0].any() and not loss[labels < 0].any()
    in_place = [
        grad.data_ptr() == local.data_ptr() for grad, (local, _, valid) in zip(grads, shards, strict=True) if valid
    ]
    assert all(in_place) == (dtype == up)


def test_cross_entropy_of_an_empty_shard() -> None:
    """A rank whose columns are all padding: largest -inf, sum 0, and no NaN on the way."""
    rubbish, labels = torch.full((3, 5), math.nan), torch.tensor([0, 4, -1])
    probabilities, stats = kernels.cross_entropy_local(rubbish, labels, 10, 0)
    assert stats.tolist() == [[-math.inf] * 3, [0.0] * 3, [0.0] * 3]
    assert not kernels.cross_entropy_backward(probabilities, labels, 10, 0, torch.zeros(3), torch.ones(3)).any()


def test_cross_entropy_of_large_logits() -> None:
    """Logits of 1e4 in fp32 neither overflow nor swallow the loss; a huge logit in another shard is felt."""
    logits = torch.tensor([[1e4, 1e4 - 1, 0.0, 1e4 - 2], [0.0, 1.0, 2.0, 9e4]])
    labels = torch.tensor([1, 0])
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    shards = [(logits[:, :2].clone(), 0, 2), (logits[:, 2:].clone(), 2, 2)]
    assert_near(sharded_loss(shards, labels, torch.ones(2))[0], expected, 1e-6)


@pytest.mark.parametrize(
    ("out", "product"),
    [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)],
)
def test_accumulate_weight_grad(out: torch.dtype, product: torch.dtype) -> None:
    start, dy, x = draw(7, 13, dtype=out), draw(33, 7, dtype=product, seed=1), draw(33, 13, dtype=product, seed=2)
    total = start.clone()
    kernels.accumulate_weight_grad(total, dy, x)
    assert_near(total, start.double() + torch.einsum("no,ni->oi", dy.double(), x.double()), TOLERANCE[product])
    assert total.dtype == out


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares(dtype: torch.dtype) -> None:
    """Over a block's end, and as exact as fp64 whatever the dtype of the values."""
    x = draw(kernels.reference.SQUARES_BLOCK + 5, dtype=dtype, scale=1e3)
    total = kernels.sum_of_squares(x)
    assert total.dtype == torch.float64 and total.item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_is_torch_adamw_bit_for_bit(dtype: torch.dtype) -> None:
    """Five steps with a gradient scale that is a power of two, so that scaling first rounds nothing."""
    settings = {"lr": 3e-3, "eps": 1e-8, "weight_decay": 0.1}
    mine = draw(1037, dtype=dtype)
    theirs = mine.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], betas=(0.9, 0.95), foreach=False, **settings)
    moments = torch.zeros_like(mine), torch.zeros_like(mine)
    for step in range(1, 6):
        grad = draw(1037, dtype=dtype, seed=step)
        theirs.grad = grad * 0.25
        optimizer.step()
        kernels.adamw(
            mine, grad.clone(), *moments, beta1=0.9, beta2=0.95, step=step, grad_scale=torch.tensor(0.25), **settings
        )
    assert torch.equal(mine, theirs.detach())
    state = optimizer.state[theirs]
    assert torch.equal(moments[0], state["exp_avg"]) and torch.equal(moments[1], state["exp_avg_sq"])


def test_adamw_does_not_depend_on_the_cut() -> None:
    """A piece of a flat buffer is updated as it is inside the whole: what sharded optimizer state rests on."""

    def update(cuts: list[int]) -> Tensor:
        param, grad = draw(1000, dtype=torch.float32), draw(1000, dtype=torch.float32, seed=1)
        state = [param, grad, torch.zeros(1000), torch.zeros(1000)]
        for piece in zip(*(t.tensor_split(cuts) for t in state), strict=True):
            kernels.adamw(
                *piece, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, grad_scale=torch.tensor(0.3)
            )
        return param

    assert torch.equal(update([]), update([1, 67, 500, 999]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_torch_sgd_bit_for_bit(weight_decay: float) -> None:
    mine, grad = draw(1037, dtype=torch.float32), draw(1037, dtype=torch.float32, seed=1)
    theirs = mine.clone().requires_grad_()
    theirs.grad = grad * 0.5
    torch.optim.SGD([theirs], lr=0.3, weight_decay=weight_decay, foreach=False).step()
    kernels.sgd(mine, grad, lr=0.3, weight_decay=weight_decay, grad_scale=torch.tensor(0.5))
    assert torch.equal(mine, theirs.detach())
