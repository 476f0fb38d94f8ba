"""The decoder: attention, MLP, block, and the part of the model that one pipeline stage holds; recompute.

The one idea: a `GPTStage` is the model restricted to a list of sites (params.py). With all sites it is the whole model,
so one process and many run the same code. Its parameters have no memory of their own (weights.py lends it), and their
names and shapes are asserted against the parameter table.

Shapes: S sequence, B batch, H hidden, D width of a head; activations are (S, B, H), or (S / tp, B, H) between layers
under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron3d import kernels, rng
from megatron3d.config import ModelConfig, Recompute
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
from megatron3d.layout import LocalTensor
from megatron3d.mesh import Axis
from megatron3d.params import EMBEDDING, HEAD, TIED_USE, kv_heads_split


@dataclass(frozen=True)
class Dropout:
    """Keyed dropout: whether a value survives depends on the seed, its sample, its place in the model and its index in
    the whole sequence, hence on no layout and no order of execution."""

    rate: float
    seed: int
    axis: Axis
    sp: bool

    def __call__(self, x: Tensor, samples: Sequence[int], layer: int, site: int) -> Tensor:
        """x (S or S / tp, B, H); `samples`: the B global sample indices, empty outside training."""
        if self.rate == 0 or not samples:
            return x
        mask = rng.dropout_mask(
            (x.shape[0], x.shape[1], x.shape[2]),
            seed=self.seed,
            samples=samples,
            layer=layer,
            site=site,
            first_row=self.axis.rank * x.shape[0] if self.sp else 0,
            keep=1 - self.rate,
            hidden=x.shape[2],
            device=x.device,
        )
        return x * mask / (1 - self.rate)


def without_saving(compute: Callable[[Tensor], Tensor], x: Tensor, consume: Callable[[Tensor], Tensor]) -> Tensor:
    """consume(compute(x)), where consume's backward recomputes compute(x) instead of keeping it.

    For cheap functions with large results (norms, activation functions): costs one more pass over x, saves one tensor.
    """
    y = compute(x)
    address, shape = y.data_ptr(), y.shape

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.data_ptr() == address and saved.shape == shape else saved

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            return compute(x)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consume(y)


class Attention(nn.Module):
    """Grouped-query self-attention with the query heads split over the tensor axis.

    Key/value heads are split too where the axis divides them; else every rank computes all of them and uses those that
    its query heads belong to.
    """

    def __init__(self, model: ModelConfig, *, axis: Axis, sp: bool) -> None:
        super().__init__()
        heads, groups, self.head_dim = model.num_attention_heads, model.num_query_groups, model.head_dim
        split = kv_heads_split(model, axis.size)
        self.queries = heads // axis.size
        self.keys = groups // axis.size if split else groups
        first = axis.rank * self.queries
        self.key_of_query = None if split else [(first + i) // (heads // groups) for i in range(self.queries)]

        rows = (self.queries + 2 * self.keys) * self.head_dim
        self.qkv = ColumnParallelLinear(model.hidden_size, rows, bias=model.bias != "none", axis=axis, sp=sp)
        self.query_norm = self._head_norm(model)
        self.key_norm = self._head_norm(model)
        self.output = RowParallelLinear(
            self.queries * self.head_dim, model.hidden_size, bias=model.bias == "all", axis=axis, sp=sp
        )

    @staticmethod
    def _head_norm(model: ModelConfig) -> Norm | None:
        return Norm(model.head_dim, kind="rmsnorm", eps=model.norm_epsilon) if model.qk_norm else None

    def forward(self, qkv: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Projections (S, B, (queries + 2 keys) x D) and rotary tables -> (S or S / tp, B, H)."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))  # (S, B, queries + 2 keys, D)
        both, value = heads.split([self.queries + self.keys, self.keys], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split([self.queries, self.keys], dim=2)
            both = torch.cat((self.query_norm(query), self.key_norm(key)), dim=2)
        if tables is not None:
            both = rotary(both, *tables)  # queries and keys in one go
        query, key = both.split([self.queries, self.keys], dim=2)
        if self.key_of_query is not None:
            # Slices, not an index: a list of indices would be copied to the device in every pass.
            key, value = (torch.stack([x[:, :, i] for i in self.key_of_query], dim=2) for x in (key, value))
        y: Tensor = self.output(causal_attention(query, key, value).flatten(2))
        return y


class MLP(nn.Module):
    """Up (and gate), activation function, down; the inner width is split over the tensor axis."""

    def __init__(self, model: ModelConfig, *, axis: Axis, sp: bool) -> None:
        super().__init__()
        self.kind = model.activation
        inner = model.ffn_hidden_size // axis.size
        bias = model.bias == "all"
        if self.kind == "swiglu":
            self.gate_up = ColumnParallelLinear(model.hidden_size, 2 * inner, bias=bias, axis=axis, sp=sp)
        else:
            self.up = ColumnParallelLinear(model.hidden_size, inner, bias=bias, axis=axis, sp=sp)
        self.down = RowParallelLinear(inner, model.hidden_size, bias=bias, axis=axis, sp=sp)

    @property
    def first(self) -> ColumnParallelLinear:
        """The linear that widens."""
        return self.gate_up if self.kind == "swiglu" else self.up

    def act(self, x: Tensor) -> Tensor:
        """The activation function."""
        return activation(x, self.kind)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(
        self, model: ModelConfig, layer: int, *, axis: Axis, sp: bool, dropout: Dropout, recompute: Recompute
    ) -> None:
        super().__init__()
        self.attention_norm = Norm(model.hidden_size, kind=model.normalization, eps=model.norm_epsilon)
        self.attention = Attention(model, axis=axis, sp=sp)
        self.mlp_norm = Norm(model.hidden_size, kind=model.normalization, eps=model.norm_epsilon)
        self.mlp = MLP(model, axis=axis, sp=sp)
        self.layer, self.dropout, self.recompute = layer, dropout, recompute

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, samples: Sequence[int]) -> Tensor:
        """(S or S / tp, B, H) -> the same shape."""
        if self.recompute == "full" and torch.is_grad_enabled():
            # There is no RNG state: dropout is keyed.
            y: Tensor = checkpoint(self._run, x, tables, samples, use_reentrant=False, preserve_rng_state=False)
            return y
        return self._run(x, tables, samples)

    def _run(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, samples: Sequence[int]) -> Tensor:
        attended = self.attention(self._then(self.attention_norm, x, self.attention.qkv), tables)
        x = x + self.dropout(attended, samples, self.layer, 1)
        widened = self._then(self.mlp_norm, x, self.mlp.first)
        return x + self.dropout(self._then(self.mlp.act, widened, self.mlp.down), samples, self.layer, 2)

    def _then(self, cheap: Callable[[Tensor], Tensor], x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
        if self.recompute == "selective" and torch.is_grad_enabled():
            return without_saving(cheap, x, linear)
        return linear(cheap(x))


class Embedding(nn.Module):
    """Word vectors, learned positions if the model has them, dropout."""

    def __init__(self, model: ModelConfig, rows: int, *, axis: Axis, sp: bool, dropout: Dropout) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(rows, model.hidden_size, axis=axis, sp=sp)
        learned = model.position_embedding == "learned"
        self.position = PositionEmbedding(model.max_position, model.hidden_size) if learned else None
        self.axis, self.sp, self.dropout = axis, sp, dropout

    def forward(self, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        """Ids (S, B) -> (S or S / tp, B, H)."""
        x: Tensor = self.word(tokens)
        if self.position is not None:
            first = self.axis.rank * x.shape[0] if self.sp else 0
            x = x + self.position(torch.arange(first, first + x.shape[0], device=x.device))
        return self.dropout(x, samples, 0, 0)


class Head(nn.Module):
    """Final norm and the projection to the vocabulary."""

    def __init__(self, model: ModelConfig, rows: int, *, axis: Axis, sp: bool) -> None:
        super().__init__()
        self.norm = Norm(model.hidden_size, kind=model.normalization, eps=model.norm_epsilon)
        self.output = ColumnParallelLinear(model.hidden_size, rows, bias=False, axis=axis, sp=sp)

    def forward(self, x: Tensor) -> Tensor:
        """(S or S / tp, B, H) -> logits (S, B, local vocabulary), padding included."""
        logits: Tensor = self.output(self.norm(x))
        return logits


class GPTStage(nn.Module):
    """The sites of one pipeline stage.

    `tensors` are this rank's local tensors (layout.local_tensors); that the modules have exactly these is asserted.
    """

    def __init__(
        self,
        model: ModelConfig,
        sites: Sequence[str],
        tensors: Sequence[LocalTensor],
        *,
        axis: Axis,
        sp: bool = False,
        recompute: Recompute = "none",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        dropout = Dropout(model.dropout, seed, axis, sp)
        if EMBEDDING in sites:
            rows = shapes["embedding.word.weight"][0]
            self.embedding = Embedding(model, rows, axis=axis, sp=sp, dropout=dropout)
        self.layers = nn.ModuleDict()
        for site in sites:
            if site not in (EMBEDDING, HEAD):
                number = site.removeprefix("layers.")
                self.layers[number] = Block(model, int(number), axis=axis, sp=sp, dropout=dropout, recompute=recompute)
        if HEAD in sites:
            self.head = Head(model, shapes[TIED_USE][0], axis=axis, sp=sp)
        self.model, self.axis = model, axis
        self.has_embedding, self.has_head = EMBEDDING in sites, HEAD in sites
        self.tables = _rotary_tables(model, dtype, torch.device(device))
        found = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        assert found == shapes, (
            f"the modules and the parameter table disagree: {set(found.items()) ^ set(shapes.items())}"
        )

    def forward(self, x: Tensor, labels: Tensor | None = None, samples: Sequence[int] = ()) -> Tensor:
        """Runs the stage.

        x: token ids (S, B) where the stage has the embedding, else hidden states. Returns hidden states; with the head,
        logits, or with `labels` (S, B) as well the loss of each token (S, B). `samples`: the B global sample indices,
        the key of dropout; empty outside training.
        """
        length = x.shape[0] if self.has_embedding or self.tables is None else self.tables[0].shape[0]
        tables = None if self.tables is None else (self.tables[0][:length], self.tables[1][:length])
        if self.has_embedding:
            x = self.embedding(x, samples)
        for block in self.layers.values():
            x = block(x, tables, samples)
        if not self.has_head:
            return x
        logits: Tensor = self.head(x)
        if labels is None:
            return logits
        return vocab_parallel_cross_entropy(logits, labels, self.axis, self.model.vocab_size)


def _rotary_tables(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines for all positions of a sample, in at least fp32 whatever the model's dtype."""
    if model.position_embedding != "rope":
        return None
    scaling = model.rope_scaling
    return kernels.rotary_tables(
        torch.arange(model.seq_length, device=device),
        model.head_dim,
        model.rope_theta,
        None
        if scaling is None
        else (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position),
        torch.promote_types(dtype, torch.float32),
    )
