"""The tables of Hugging Face's model families: GPT-2, Llama, Mistral, Qwen2, Qwen3.

The one idea: what differs between families is data, one table each; what is done with it is in huggingface.py
(settings) and huggingface_files.py (tensors). Defaults are those of transformers, for files that lack a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron3d.config import ModelConfig
from megatron3d.params import param_table


class Module(NamedTuple):
    """A module of theirs, or a tensor of it, and those of ours that are stacked in it; {} is the layer's number."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    """Matrices are kept as (inputs, outputs)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What its models share, and how they are written down."""

    name: str
    """model_type."""
    architecture: str
    """Class in transformers."""
    prefix: str
    """Of all tensors but the head's; files of the model without its head lack it."""
    modules: tuple[Module, ...]
    """All that a model may have; which tensors there are follows from the model's own parameters."""
    ignored: tuple[str, ...]
    """Patterns of stored tensors that follow from the settings."""
    fixed: Mapping[str, Any]
    """Fields of ModelConfig that no setting changes."""
    fields: Mapping[str, str]
    """Field of config.json -> of ModelConfig."""
    defaults: Mapping[str, Any]
    """What transformers takes where the field is missing."""
    only: Mapping[str, tuple[Any, ...]]
    """Settings that change the model's function -> the values under which it is ours; the first is what is written,
    None is to leave it out."""
    attention_dropout: str
    """Field of the one dropout that is not built."""
    even_heads: bool = False
    """transformers wants the width to be a multiple of the number of heads."""

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary."""
        return bool(self.fixed["position_embedding"] == "rope")

    def tensors(self, model: ModelConfig) -> list[Module]:
        """All tensors of a resolved `model` that the family can express, in depth order."""
        order = {spec.name: number for number, spec in enumerate(param_table(model))}
        found = [
            Module(
                f"{module.name.format(layer)}.{kind}", tuple(f"{part.format(layer)}.{kind}" for part in module.parts)
            )._replace(transposed=module.transposed and kind == "weight")
            for module in self.modules
            for layer in range(model.num_layers if "{}" in module.name else 1)
            for kind in ("weight", "bias")
        ]
        found = [tensor for tensor in found if tensor.parts[0] in order]
        assert sorted(order) == sorted(part for tensor in found for part in tensor.parts)
        return sorted(found, key=lambda tensor: order[tensor.parts[0]])


GPT2_MODULES = (
    Module("transformer.wte", ("embedding.word",)),
    Module("transformer.wpe", ("embedding.position",)),
    Module("transformer.h.{}.ln_1", ("layers.{}.attention_norm",)),
    Module(
        "transformer.h.{}.attn.c_attn",
        ("layers.{}.attention.query", "layers.{}.attention.key", "layers.{}.attention.value"),
        transposed=True,
    ),
    Module("transformer.h.{}.attn.c_proj", ("layers.{}.attention.output",), transposed=True),
    Module("transformer.h.{}.ln_2", ("layers.{}.mlp_norm",)),
    Module("transformer.h.{}.mlp.c_fc", ("layers.{}.mlp.up",), transposed=True),
    Module("transformer.h.{}.mlp.c_proj", ("layers.{}.mlp.down",), transposed=True),
    Module("transformer.ln_f", ("head.norm",)),
    Module("lm_head", ("head.output",)),
)
LLAMA_MODULES = (
    Module("model.embed_tokens", ("embedding.word",)),
    Module("model.layers.{}.input_layernorm", ("layers.{}.attention_norm",)),
    Module("model.layers.{}.self_attn.q_proj", ("layers.{}.attention.query",)),
    Module("model.layers.{}.self_attn.k_proj", ("layers.{}.attention.key",)),
    Module("model.layers.{}.self_attn.v_proj", ("layers.{}.attention.value",)),
    Module("model.layers.{}.self_attn.q_norm", ("layers.{}.attention.query_norm",)),
    Module("model.layers.{}.self_attn.k_norm", ("layers.{}.attention.key_norm",)),
    Module("model.layers.{}.self_attn.o_proj", ("layers.{}.attention.output",)),
    Module("model.layers.{}.post_attention_layernorm", ("layers.{}.mlp_norm",)),
    Module("model.layers.{}.mlp.gate_proj", ("layers.{}.mlp.gate",)),
    Module("model.layers.{}.mlp.up_proj", ("layers.{}.mlp.up",)),
    Module("model.layers.{}.mlp.down_proj", ("layers.{}.mlp.down",)),
    Module("model.norm", ("head.norm",)),
    Module("lm_head", ("head.output",)),
)

GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_inner": "ffn_hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position",
    "activation_function": "activation",
    "layer_norm_epsilon": "norm_epsilon",
    "embd_pdrop": "dropout",
    "resid_pdrop": "dropout",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied_embeddings",
}
LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied_embeddings",
}
LLAMA_FIXED = {"activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope"}
LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
QWEN_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
ANY_ONLY: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "auto_map": (None,), "pruned_heads": (None, {})}
LLAMA_ONLY = {**ANY_ONLY, "hidden_act": ("silu", "swish"), "layer_types": (None, "full_attention")}
LLAMA_IGNORED = ("*.rotary_emb.inv_freq",)

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    modules=GPT2_MODULES,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    fixed={"normalization": "layernorm", "position_embedding": "learned", "bias": "all"},
    fields=GPT2_FIELDS,
    defaults={
        "vocab_size": 50257,
        "n_embd": 768,
        "n_inner": None,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    only={
        **ANY_ONLY,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    attention_dropout="attn_pdrop",
    even_heads=True,
)
LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    ignored=LLAMA_IGNORED,
    fixed={**LLAMA_FIXED, "bias": "none"},
    fields=LLAMA_FIELDS,
    defaults=LLAMA_DEFAULTS,
    only={**LLAMA_ONLY, "attention_bias": (False,), "mlp_bias": (False,)},
    attention_dropout="attention_dropout",
    even_heads=True,
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    ignored=LLAMA_IGNORED,
    fixed={**LLAMA_FIXED, "bias": "none"},
    fields={**LLAMA_FIELDS, "sliding_window": "sliding_window"},
    defaults={
        **LLAMA_DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    only=LLAMA_ONLY,
    attention_dropout="attention_dropout",
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    ignored=LLAMA_IGNORED,
    fixed={**LLAMA_FIXED, "bias": "qkv"},
    fields=LLAMA_FIELDS,
    defaults=QWEN_DEFAULTS,
    only={**LLAMA_ONLY, "use_sliding_window": (False,)},
    attention_dropout="attention_dropout",
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    modules=LLAMA_MODULES,
    ignored=LLAMA_IGNORED,
    fixed={**LLAMA_FIXED, "bias": "none", "qk_norm": True},
    fields=LLAMA_FIELDS,
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    only={**LLAMA_ONLY, "use_sliding_window": (False,), "attention_bias": (False,)},
    attention_dropout="attention_dropout",
)
FAMILIES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)
"""In the order in which a model is offered to them."""

VALUES = {"activation_function": {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}}
"""Field whose values are words -> theirs -> ours; of equals the first is written."""
NULLABLE = frozenset({"n_inner", "num_key_value_heads", "head_dim", "sliding_window"})
"""Fields that may be null: there is none, or it follows from the others."""
ROPE = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"}
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TRANSLATED = (
    frozenset(name for family in FAMILIES for table in (family.fields, family.only) for name in table)
    | ROPE
    | {"model_type", "architectures", "torch_dtype", "dtype"}
)
"""Fields that a model decides: they are written from it, never carried from an earlier file."""
INERT = frozenset(
    name
    for names in (
        "_name_or_path transformers_version tokenizer_class model_max_length task_specific_params prefix",
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id",
        "use_cache output_hidden_states output_attentions output_past return_dict return_dict_in_generate use_bfloat16",
        "attn_implementation _attn_implementation torchscript gradient_checkpointing pretraining_tp",
        "attn_pdrop attention_dropout n_ctx n_special predict_special_tokens max_window_layers max_sequence_length",
        "is_encoder_decoder is_decoder tie_encoder_decoder cross_attention_hidden_size finetuning_task problem_type",
        "id2label label2id num_labels summary_type summary_use_proj summary_activation summary_first_dropout",
        "summary_proj_to_labels chunk_size_feed_forward",
    )
    for name in names.split()
)
"""Fields known to change nothing that is computed here; they are carried along."""
