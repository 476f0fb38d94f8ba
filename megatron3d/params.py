"""The list of all parameters: the single source for the model, initial values, optimizer, checkpoint and cost.

The one idea: each parameter is a row of global facts (name, unpadded shape, how it is split, where it is used), the
same on every layout. Who holds which part of it follows by arithmetic (layout.py). Fused local tensors
(query+key+value, gate+up) are concatenations of parts; names, checkpoints and optimizer pieces speak of the parts.

A *site* is a place in the depth of the model, and the name of a child of the stage module: "embedding", "layers.0",
..., "head". A tied embedding has two sites, every other parameter one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron3d.config import ModelConfig

EMBEDDING, HEAD = "embedding", "head"
VOCAB_MULTIPLE = 64  # rows of a vocabulary shard are padded to this: aligned rows keep matrix products fast
TIED_USE = "head.output.weight"  # local name of the embedding matrix where the head uses it


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Global facts of one parameter."""

    name: str
    """Canonical, global, unfused: "layers.3.attention.query.weight"."""
    shape: tuple[int, ...]
    """Global and unpadded."""
    sites: tuple[str, ...]
    """Where it is used, in depth order; the first one owns it."""
    tensor: str
    """Local tensor of which it is a part: "layers.3.attention.qkv.weight"; its own name if not fused."""
    shard: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis -> dim split over it."""
    partial: frozenset[str] = frozenset()
    """Mesh axes over which each rank computes only a part of the gradient of a value that all of them hold."""
    multiple: int = 1
    """A shard's extent is padded up to a multiple of this."""
    decay: bool = False
    """Subject to weight decay (matrices)."""
    init: Literal["normal", "ones", "zeros"] = "normal"
    """Initial values."""
    std: float = 0.0
    """Standard deviation of normal initial values."""

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def param_table(model: ModelConfig, *, tp: int = 1, sp: bool = False) -> list[ParamSpec]:
    """All parameters of a resolved `model` in depth order.

    `tp` and `sp` touch nothing but `partial` and whether keys and values are split: with fewer key/value heads than
    ranks (or a number that tp does not divide) every rank holds them whole and uses the heads its queries need.
    """
    return list(_Table(model, tp, sp).rows())


def num_parameters(specs: Iterable[ParamSpec]) -> int:
    """Total number of values."""
    return sum(spec.size for spec in specs)


def all_sites(model: ModelConfig) -> list[str]:
    """Every site in depth order."""
    return [EMBEDDING, *(f"layers.{i}" for i in range(model.num_layers)), HEAD]


def stage_sites(stage_layers: Sequence[int], stage: int) -> list[str]:
    """Sites of one pipeline stage: its layers; the embedding with the first stage, the head with the last."""
    first = sum(stage_layers[:stage])
    layers = [f"layers.{i}" for i in range(first, first + stage_layers[stage])]
    return [EMBEDDING] * (stage == 0) + layers + [HEAD] * (stage == len(stage_layers) - 1)


def kv_heads_split(model: ModelConfig, tp: int) -> bool:
    """Whether key/value heads are split over tp ranks rather than held whole by each."""
    return model.num_query_groups % tp == 0


class _Table:
    """Writes the rows; the fields hold what every row asks for."""

    def __init__(self, model: ModelConfig, tp: int, sp: bool) -> None:
        self.model = model
        self.tp = tp
        self.on_sequence_shard = frozenset({"tp"}) if sp and tp > 1 else frozenset[str]()
        self.on_head_shard = frozenset({"tp"}) if tp > 1 else frozenset[str]()
        self.residual_std = model.init_std / math.sqrt(2 * model.num_layers)

    def rows(self) -> Iterator[ParamSpec]:
        model, hidden = self.model, self.model.hidden_size
        word_sites = (EMBEDDING, HEAD) if model.tied_embeddings else (EMBEDDING,)
        yield self._vocabulary("embedding.word.weight", word_sites)
        if model.position_embedding == "learned":
            name = "embedding.position.weight"
            yield ParamSpec(
                name=name,
                tensor=name,
                shape=(model.max_position, hidden),
                sites=(EMBEDDING,),
                partial=self.on_sequence_shard,
                decay=True,
                std=model.init_std,
            )
        for layer in range(model.num_layers):
            yield from self._layer(f"layers.{layer}")
        yield from self._norm("head.norm", HEAD, hidden, self.on_sequence_shard)
        if not model.tied_embeddings:
            yield self._vocabulary("head.output.weight", (HEAD,))

    def _layer(self, site: str) -> Iterator[ParamSpec]:
        model, hidden, head_dim = self.model, self.model.hidden_size, self.model.head_dim
        queries, keys = model.num_attention_heads * head_dim, model.num_query_groups * head_dim
        kv_split = kv_heads_split(model, self.tp)
        has_bias = model.bias == "all"

        yield from self._norm(f"{site}.attention_norm", site, hidden, self.on_sequence_shard)
        for part, rows in (("query", queries), ("key", keys), ("value", keys)):
            split = part == "query" or kv_split
            yield from self._column(site, "attention.qkv", part, rows, split=split, bias=model.bias != "none")
        if model.qk_norm:
            for part in ("query_norm", "key_norm"):
                yield self._scale(f"{site}.attention.{part}.weight", site, head_dim, self.on_head_shard)
        yield from self._row(site, "attention.output", queries, bias=has_bias)

        yield from self._norm(f"{site}.mlp_norm", site, hidden, self.on_sequence_shard)
        gated = model.activation == "swiglu"
        for part in ("gate", "up") if gated else ("up",):
            tensor = "mlp.gate_up" if gated else "mlp.up"
            yield from self._column(site, tensor, part, model.ffn_hidden_size, split=True, bias=has_bias)
        yield from self._row(site, "mlp.down", model.ffn_hidden_size, bias=has_bias)

    def _vocabulary(self, name: str, sites: tuple[str, ...]) -> ParamSpec:
        shape = (self.model.vocab_size, self.model.hidden_size)
        return ParamSpec(
            name=name,
            tensor=name,
            shape=shape,
            sites=sites,
            shard={"tp": 0},
            multiple=VOCAB_MULTIPLE,
            decay=True,
            std=self.model.init_std,
        )

    def _column(self, site: str, tensor: str, part: str, rows: int, *, split: bool, bias: bool) -> Iterator[ParamSpec]:
        """Rows (outputs) split over tp; `tensor` is the fused local linear, `part` this parameter within it."""
        name = f"{site}.{tensor.partition('.')[0]}.{part}"
        shard = {"tp": 0} if split else {}
        partial = frozenset[str]() if split else self.on_head_shard
        yield ParamSpec(
            name=f"{name}.weight",
            tensor=f"{site}.{tensor}.weight",
            shape=(rows, self.model.hidden_size),
            sites=(site,),
            shard=shard,
            partial=partial,
            decay=True,
            std=self.model.init_std,
        )
        if bias:
            yield ParamSpec(
                name=f"{name}.bias",
                tensor=f"{site}.{tensor}.bias",
                shape=(rows,),
                sites=(site,),
                shard=shard,
                partial=partial,
                init="zeros",
            )

    def _row(self, site: str, part: str, columns: int, *, bias: bool) -> Iterator[ParamSpec]:
        """Columns (inputs) split over tp; the bias is added once, after the sum over ranks."""
        name = f"{site}.{part}"
        yield ParamSpec(
            name=f"{name}.weight",
            tensor=f"{name}.weight",
            shape=(self.model.hidden_size, columns),
            sites=(site,),
            shard={"tp": 1},
            decay=True,
            std=self.residual_std,
        )
        if bias:
            yield ParamSpec(
                name=f"{name}.bias",
                tensor=f"{name}.bias",
                shape=(self.model.hidden_size,),
                sites=(site,),
                partial=self.on_sequence_shard,
                init="zeros",
            )

    def _norm(self, name: str, site: str, size: int, partial: frozenset[str]) -> Iterator[ParamSpec]:
        yield self._scale(f"{name}.weight", site, size, partial)
        if self.model.normalization == "layernorm":
            yield self._scale(f"{name}.bias", site, size, partial, init="zeros")

    def _scale(
        self, name: str, site: str, size: int, partial: frozenset[str], init: Literal["ones", "zeros"] = "ones"
    ) -> ParamSpec:
        return ParamSpec(name=name, tensor=name, shape=(size,), sites=(site,), partial=partial, init=init)
