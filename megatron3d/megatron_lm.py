"""Megatron-LM's tensors: its names, what is fused in them, and how tensor ranks share them.

The one idea: both directions of a conversion are tables. Names are those of its local layers ("local spec");
Transformer Engine's and the classic model's are other spellings of them. All of this is values: settings are in
megatron_args.py, folders and files in megatron_legacy.py, megatron_dist.py and megatron_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron3d.config import ModelConfig
from megatron3d.interop import Foreign
from megatron3d.params import ParamSpec, param_table

WORDS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

MODULES = (
    ("embedding.word_embeddings", ("embedding.word",)),
    ("embedding.position_embeddings", ("embedding.position",)),
    ("decoder.layers.{}.input_layernorm", ("layers.{}.attention_norm",)),
    (
        "decoder.layers.{}.self_attention.linear_qkv",
        ("layers.{}.attention.query", "layers.{}.attention.key", "layers.{}.attention.value"),
    ),
    ("decoder.layers.{}.self_attention.q_layernorm", ("layers.{}.attention.query_norm",)),
    ("decoder.layers.{}.self_attention.k_layernorm", ("layers.{}.attention.key_norm",)),
    ("decoder.layers.{}.self_attention.linear_proj", ("layers.{}.attention.output",)),
    ("decoder.layers.{}.pre_mlp_layernorm", ("layers.{}.mlp_norm",)),
    ("decoder.layers.{}.mlp.linear_fc1", ("layers.{}.mlp.gate", "layers.{}.mlp.up")),
    ("decoder.layers.{}.mlp.linear_fc2", ("layers.{}.mlp.down",)),
    ("decoder.final_layernorm", ("head.norm",)),
    ("output_layer", ("head.output",)),
)
"""Their module -> ours that are stacked in it; which parameters there are follows from the model."""
SPLIT = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}
"""Last words of a name -> dim that tensor ranks share; each has all of any other tensor."""
SPELLINGS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        # Transformer Engine has the norm within the linear layer that follows it.
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        # The classic model, before megatron-core.
        (r"^language_model\.(?:encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    )
)
IGNORED = re.compile(r"(^|\.)_extra_state(/|$)|(^|\.)rotary_(pos_)?emb\.inv_freq$")
"""What is stored beside the weights: factors of 8-bit layers, and frequencies that follow from the settings."""


@dataclass(frozen=True)
class Shared:
    """A whole tensor of theirs, made of ours, and how tensor ranks share it."""

    foreign: Foreign
    split: int | None
    padded: bool
    """Rows of the vocabulary, of which there are more than the model has."""


def shared_tensors(model: ModelConfig, fused: int) -> list[Shared]:
    """All tensors of a resolved `model`, in depth order.

    `fused`: into how many groups the rows of SwiGLU's gate and up are dealt. Where each tensor rank has [gate; up] of
    its own, the whole tensor has as many groups as there are ranks; in a distributed checkpoint there is one.
    """
    order = {spec.name: number for number, spec in enumerate(param_table(model))}
    found = []
    for module, ours in MODULES:
        for layer in range(model.num_layers if "{}" in module else 1):
            for kind in ("weight", "bias"):
                named = (f"{part.format(layer)}.{kind}" for part in ours)
                if parts := tuple(name for name in named if name in order):
                    found.append(_shared(f"{module.format(layer)}.{kind}", parts, model, fused))
    return sorted(found, key=lambda shared: order[shared.foreign.parts[0]])


def _shared(name: str, parts: tuple[str, ...], model: ModelConfig, fused: int) -> Shared:
    groups = {"linear_qkv": model.num_query_groups, "linear_fc1": fused}.get(name.split(".")[-2], 1)
    return Shared(
        Foreign(name, parts, groups=groups if len(parts) > 1 else 1), split_dim(name), name in (WORDS, OUTPUT)
    )


def whole_shape(shared: Shared, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
    """Of a tensor of theirs, without padding."""
    shapes = [specs[part].shape for part in shared.foreign.parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def split_dim(name: str) -> int | None:
    """The dim that tensor ranks share of a tensor; None where each has all of it."""
    return SPLIT.get(".".join(name.split(".")[-2:]))


def local_name(name: str) -> str:
    """The spelling of the local layers."""
    for pattern, spelling in SPELLINGS:
        name = pattern.sub(spelling, name)
    return name


def engine_name(name: str) -> str:
    """The spelling of Transformer Engine's layers, of a name of the local ones."""
    name = re.sub(r"\.input_layernorm\.(?=\w+$)", ".self_attention.linear_qkv.layer_norm_", name)
    return re.sub(r"\.pre_mlp_layernorm\.(?=\w+$)", ".mlp.linear_fc1.layer_norm_", name)
