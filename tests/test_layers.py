"""Tensor-parallel layers against plain torch on whole tensors, forward and backward, with and without slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron3d.comm import all_reduce
from megatron3d.config import ParallelConfig
from megatron3d.data import Datasets
from megatron3d.layers import (
    ColumnParallelLinear,
    Norm,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    activation,
    causal_attention,
    rotary,
    vocab_parallel_cross_entropy,
)
from megatron3d.mesh import Axis, Mesh
from tests import reference, toy
from tests.lone import lone_trainer, whole_weights
from tests.ranks import on_mesh

S, B, H, OUT, VOCAB = 12, 2, 8, 24, 131


class Collected:
    """A slot that adds up what it is given, as a bucket does, and counts it."""

    def __init__(self, parameter: Tensor) -> None:
        self.total = torch.zeros_like(parameter)
        self.arrivals = 0

    def deposit(self, add: Callable[[Tensor], None]) -> None:
        add(self.total)
        self.arrivals += 1


def draw(name: str, *shape: int) -> Tensor:
    """The same fp64 values for the same name on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def part(whole: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's equal share of a whole tensor."""
    return whole.chunk(axis.size, dim)[axis.rank].clone()


def adopt(module: nn.Module, slots: bool, **parameters: Tensor) -> dict[str, Any]:
    """Gives a module its weights and, if asked, slots; returns where each gradient will be found."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        setattr(module, name, nn.Parameter(value))
        if slots:
            found[name] = Collected(value)
            setattr(module, f"{name}_grad", found[name])
        else:
            found[name] = getattr(module, name)
    return found


def gradient(place: Any) -> Tensor:
    """What arrived: once, in the slot alone or in `.grad` alone."""
    if isinstance(place, Collected):
        assert place.arrivals == 1
        return place.total
    grad: Tensor = place.grad
    return grad


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def on_tp(size: int, body: Callable[..., None]) -> None:
    """body(tp axis, sp, slots) for all four combinations on `size` ranks."""

    def every_way(mesh: Mesh) -> None:
        for sp in (False, True) if size > 1 else (False,):
            for slots in (True, False):
                body(mesh.tp, sp, slots)

    on_mesh(ParallelConfig(tp=size, pp=1, dp=1, timeout_seconds=60), every_way)


TP = pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])


def check_linears(axis: Axis, sp: bool, slots: bool) -> None:
    """Column and row linear in turn, with a function between them that mixes nothing over ranks."""
    whole = {
        "x": draw("x", S, B, H),
        "first": draw("first", OUT, H),
        "first_bias": draw("first_bias", OUT),
        "second": draw("second", H, OUT),
        "second_bias": draw("second_bias", H),
    }
    dy = draw("dy", S, B, H)
    leaves = {name: value.clone().requires_grad_() for name, value in whole.items()}
    middle = F.linear(leaves["x"], leaves["first"], leaves["first_bias"])
    y = F.linear(middle.tanh(), leaves["second"], leaves["second_bias"])
    y.backward(dy)

    column = ColumnParallelLinear(H, OUT // axis.size, bias=True, axis=axis, sp=sp)
    row = RowParallelLinear(OUT // axis.size, H, bias=True, axis=axis, sp=sp)
    of_column = adopt(column, slots, weight=part(whole["first"], axis), bias=part(whole["first_bias"], axis))
    of_row = adopt(row, slots, weight=part(whole["second"], axis, 1), bias=whole["second_bias"].clone())
    x = (part(whole["x"], axis) if sp else whole["x"].clone()).requires_grad_()
    inner = column(x)
    out = row(inner.tanh())
    out.backward(part(dy, axis) if sp else dy)

    same(inner, part(middle, axis, 2))
    same(out, part(y, axis) if sp else y)
    dx = leaves["x"].grad
    assert dx is not None and x.grad is not None
    same(x.grad, part(dx, axis) if sp else dx)
    for place, name, dim in ((of_column["weight"], "first", 0), (of_column["bias"], "first_bias", 0)):
        same(gradient(place), part(grad_of(leaves[name]), axis, dim))
    same(gradient(of_row["weight"]), part(grad_of(leaves["second"]), axis, 1))
    bias_grad = gradient(of_row["bias"])
    same(all_reduce(bias_grad.clone(), axis) if sp else bias_grad, grad_of(leaves["second_bias"]))
    if slots:
        assert all(parameter.grad is None for module in (column, row) for parameter in module.parameters())


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


@TP
def test_column_and_row_linear(size: int) -> None:
    """Forward, input gradient, weight and bias gradients; under sp the row bias has a partial gradient."""
    on_tp(size, check_linears)


def check_embedding(axis: Axis, sp: bool, slots: bool) -> None:
    local = 64 * -(-VOCAB // (64 * axis.size))
    whole = draw("table", VOCAB, H)
    tokens = torch.randint(0, VOCAB, (S, B), generator=torch.Generator().manual_seed(1))
    tokens[0], tokens[1] = VOCAB - 1, 0
    dy = draw("dy", S, B, H)
    leaf = whole.clone().requires_grad_()
    F.embedding(tokens, leaf).backward(dy)
    padded = torch.cat([whole, torch.full((local * axis.size - VOCAB, H), 1e9, dtype=torch.float64)])
    expected = torch.cat([grad_of(leaf), torch.zeros(local * axis.size - VOCAB, H, dtype=torch.float64)])

    module = VocabParallelEmbedding(local, H, axis=axis, sp=sp)
    places = adopt(module, slots, weight=part(padded, axis))
    y = module(tokens)
    y.backward(part(dy, axis) if sp else dy)
    same(y, part(whole[tokens], axis) if sp else whole[tokens])
    same(gradient(places["weight"]), part(expected, axis))


@TP
def test_vocabulary_embedding(size: int) -> None:
    """131 ids in padded shards: every id is looked up on the one rank that holds it; padding gets no gradient."""
    on_tp(size, check_embedding)


def check_norms(axis: Axis, sp: bool, slots: bool) -> None:
    weight, bias, whole, dy = draw("weight", H), draw("bias", H), draw("x", S, B, H), draw("dy", S, B, H)
    for kind in ("rmsnorm", "layernorm"):
        leaves = [value.clone().requires_grad_() for value in (whole, weight, bias)]
        if kind == "layernorm":
            y = F.layer_norm(leaves[0], (H,), leaves[1], leaves[2], 1e-5)
        else:
            y = F.rms_norm(leaves[0], (H,), leaves[1], 1e-5)
        y.backward(dy)
        module = Norm(H, kind=kind, eps=1e-5)
        parameters = {"weight": weight.clone()} | ({"bias": bias.clone()} if kind == "layernorm" else {})
        places = adopt(module, slots, **parameters)
        x = (part(whole, axis) if sp else whole.clone()).requires_grad_()
        out = module(x)
        out.backward(part(dy, axis) if sp else dy)
        same(out, part(y, axis) if sp else y)
        same(grad_of(x), part(grad_of(leaves[0]), axis) if sp else grad_of(leaves[0]))
        for name, leaf in zip(places, leaves[1:], strict=False):
            grad = gradient(places[name])
            same(all_reduce(grad.clone(), axis) if sp else grad, grad_of(leaf))


@TP
def test_norms(size: int) -> None:
    """Under sp each rank has a part of the gradient of weight and bias, and the parts add up."""
    on_tp(size, check_norms)


def check_cross_entropy(axis: Axis, labels: Tensor) -> None:
    local = 64 * -(-VOCAB // (64 * axis.size))
    whole = 3 * draw("logits", *labels.shape, VOCAB)
    leaf = whole.clone().requires_grad_()
    expected = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    dloss = draw("dloss", *labels.shape)
    expected.backward(dloss.flatten())

    padding = torch.full((*labels.shape, local * axis.size - VOCAB), 50.0, dtype=torch.float64)  # would win the softmax
    logits = part(torch.cat([whole, padding], -1), axis, 2).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits.clone(), labels, axis, VOCAB)  # the backward pass overwrites them
    loss.backward(dloss)
    same(loss, expected.view_as(labels))
    same(grad_of(logits), part(torch.cat([grad_of(leaf), torch.zeros_like(padding)], -1), axis, 2))


def check_all_labels(mesh: Mesh) -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 64, (S, B), generator=generator)
    second = torch.randint(64, VOCAB, (S, B), generator=generator)
    mixed = torch.where(torch.rand(S, B, generator=generator) < 0.5, first, VOCAB - 1)
    mixed[0], mixed[1] = -100, 0
    for labels in (first, second.clamp(max=127), second, mixed, torch.full((S, B), -100)):
        check_cross_entropy(mesh.tp, labels)


@TP
def test_cross_entropy(size: int) -> None:
    """NUM-03: targets in the first shard only, in the second only, mixed, ignored: loss and gradient are those of
    torch over 131 classes; padded logits are outside the softmax and get no gradient."""
    on_mesh(ParallelConfig(tp=size, pp=1, dp=1, timeout_seconds=60), check_all_labels)


def test_position_embedding() -> None:
    module, whole = PositionEmbedding(S, H), draw("positions", S, H)
    places = adopt(module, True, weight=whole.clone())
    y = module(torch.tensor([3, 4, 5]))
    y.backward(torch.ones_like(y))
    assert torch.equal(y, whole[3:6, None])
    expected = torch.zeros(S, H, dtype=torch.float64)
    expected[3:6] = 1
    assert torch.equal(gradient(places["weight"]), expected)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu"])
def test_activation_functions(kind: str) -> None:
    x = draw("x", S, B, 2 * H).requires_grad_()
    again = x.detach().clone().requires_grad_()
    if kind == "swiglu":
        expected = F.silu(again[..., :H]) * again[..., H:]
    else:
        expected = F.gelu(again, approximate="tanh" if kind == "gelu_tanh" else "none")
    dy = draw("dy", *expected.shape)
    expected.backward(dy)
    y = activation(x, kind)
    y.backward(dy)
    same(y, expected)
    same(grad_of(x), grad_of(again))


def test_rotary_turns_by_position() -> None:
    """Pairs (i, i + D / 2) turned by the angle of their position; the backward turns back."""
    x = draw("x", S, B, 3, 4).requires_grad_()
    angles = torch.outer(torch.arange(S, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64))
    y = rotary(x, angles.cos(), angles.sin())
    turn = torch.polar(torch.ones_like(angles), angles)[:, None, None]
    pairs = torch.complex(x[..., :2], x[..., 2:]) * turn
    same(y, torch.cat([pairs.real, pairs.imag], -1).detach())
    y.backward(y.detach())
    same(grad_of(x), x.detach())


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention with an explicit mask; keys and values repeated over their query heads."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mixed: Tensor = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
    return mixed.permute(2, 0, 1, 3)


@pytest.mark.parametrize("groups", [6, 2, 1])
def test_causal_attention(groups: int) -> None:
    inputs = [draw(name, S, B, heads, 4).requires_grad_() for name, heads in (("q", 6), ("k", groups), ("v", groups))]
    again = [value.detach().clone().requires_grad_() for value in inputs]
    y, expected = causal_attention(*inputs), plain_attention(*again)
    dy = draw("dy", S, B, 6, 4)
    y.backward(dy)
    expected.backward(dy)
    same(y, expected)
    for one, other in zip(inputs, again, strict=True):
        same(grad_of(one), grad_of(other))


@pytest.mark.parametrize(("queries", "keys"), [(4, 8), (8, 4)])
def test_unequal_lengths_are_refused(queries: int, keys: int) -> None:
    """NUM-09: back-ends align a causal rectangle differently, so there is none."""
    q, k = draw("q", queries, 1, 2, 4), draw("k", keys, 1, 2, 4)
    with pytest.raises(ValueError, match=f"not {queries} queries and {keys} keys"):
        causal_attention(q, k, k)


class TwoLengths:
    """Two samples over and over, the first with 11 valid tokens, the second with 101."""

    size = 0
    seq_length = 112

    def sample(self, index: int) -> Any:
        tokens, labels = toy.RandomData(VOCAB, self.seq_length).sample(index % 2)
        labels = tokens[::-1].copy()
        labels[(11, 101)[index % 2] :] = -100
        return tokens, labels


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_loss_is_a_mean_over_tokens(micro_batch_size: int) -> None:
    """LOSS-01: two microbatches of one sample, or one of two: sum of token losses / valid tokens, and its gradient."""
    model = replace(toy.LLAMA, num_layers=1, seq_length=112)
    config = toy.config(
        model, dtype="fp64", global_batch_size=2, micro_batch_size=micro_batch_size, train_steps=1, clip_grad=0.0
    )
    data = TwoLengths()
    trainer = lone_trainer(config, data=Datasets(data, None, ""))
    result = trainer.step()
    batch = [torch.stack([torch.from_numpy(data.sample(i)[kind]) for i in range(2)]) for kind in range(2)]
    weights = {name: value.double() for name, value in toy.random_weights(config.model).items()}
    losses, norms, after = reference.train(
        weights, config.model, [(batch[0], batch[1])], lr=lambda _: 0.3, clip=0.0, decay=0.01
    )
    assert result.valid_tokens == 112
    assert result.loss == pytest.approx(losses[0], rel=1e-12) and result.grad_norm == pytest.approx(norms[0], rel=1e-10)
    assert toy.largest_gap(whole_weights(trainer), after)[0] < 1e-12


def check_gathered_is_not_saved(axis: Axis, sp: bool, slots: bool) -> None:
    """Under sp the column linear keeps the sequence shard, never the gathered sequence."""
    column = ColumnParallelLinear(H, OUT // axis.size, bias=False, axis=axis, sp=sp)
    adopt(column, slots, weight=part(draw("first", OUT, H), axis))
    x = draw("x", S, B, H)
    x = (part(x, axis) if sp else x).requires_grad_()
    y = column(x)
    saved = [tuple(tensor.shape) for tensor in y.grad_fn.saved_tensors if tensor is not None]
    assert saved == [tuple(x.shape), tuple(column.weight.shape)]


def test_sequence_shards_are_what_is_saved() -> None:
    on_tp(2, check_gathered_is_not_saved)
