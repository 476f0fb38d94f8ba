"""Megatron-LM's settings, the `args` that it keeps in a checkpoint, as a ModelConfig and back.

The one idea: a table of fields for each kind of setting (numbers, words, those that must not be otherwise), walked in
either direction. What its settings are called on a command line is in megatron_names.py, its tensors are in
megatron_lm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron3d.config import ConfigError, ModelConfig, RopeScaling
from megatron3d.words import listed

NUMBERS = {
    "num_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("ffn_hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "head_dim": ("kv_channels",),
    "seq_length": ("seq_length",),
    "max_position": ("max_position_embeddings",),
    "norm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "dropout": ("hidden_dropout",),
    "init_std": ("init_method_std",),
}
"""Our field -> theirs, newest spelling first."""
NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "max_position")
WORDED = {
    "normalization": ("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "LayerNorm"),
    "position_embedding": (
        "position_embedding_type",
        {"learned_absolute": "learned", "rope": "rope"},
        "learned_absolute",
    ),
}
"""Our field -> theirs, its values as ours, what it is where it is missing."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "no_rope_freq": (None,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "openai_gelu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "softmax_type": ("vanilla",),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "linear_attention_type": (None,),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "use_mup": (False,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "spec": (None,),
}
"""Settings that change the model's function -> the values under which it is ours; the first is what is written."""
TOKENIZER, NULL = "GPT2BPETokenizer", "NullTokenizer"
"""The tokenizer that --vocab-file is of, as a rule; the one of which vocab_size leaves out the end of documents."""
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
"""What use_rope_scaling means; only the factor is a setting."""


def model_of(args: Mapping[str, Any], vocab_size: int | None) -> ModelConfig:
    """The unresolved model that Megatron-LM's `args` describe; `vocab_size` goes before what they say of it.

    ConfigError names the setting that cannot be honoured, its value and the values that can.
    """
    refused = [
        f"{name} is {_shown(args[name])} (what works is {listed(map(_shown, legal), 'or')})"
        for name, legal in ONLY.items()
        if name in args and not _is_one_of(args[name], legal)
    ]
    if refused:
        raise ConfigError(f"its args ask for what is not built here: {listed(refused, 'and')}.")
    settings: dict[str, Any] = {ours: value for ours in NUMBERS if (value := _number(args, ours)) is not None}
    if missing := [NUMBERS[ours][0] for ours in NEEDED if ours not in settings]:
        raise ConfigError(f"its args do not say {listed(missing, 'and')}.")
    for ours, (theirs, values, default) in WORDED.items():
        settings[ours] = _word(theirs, values, args.get(theirs, default))
    if args.get("use_rotary_position_embeddings"):
        settings["position_embedding"] = "rope"
    if settings["position_embedding"] == "rope":
        settings |= _rope(args)
    model = ModelConfig(
        **settings,
        num_query_groups=_integer(args, "num_query_groups") if args.get("group_query_attention") else 0,
        vocab_size=_vocabulary(args) if vocab_size is None else vocab_size,
        activation=_activation(args),
        bias="all" if _biased(args) else "qkv" if args.get("add_qkv_bias") else "none",
        qk_norm=bool(args.get("qk_layernorm")),
        tied_embeddings=not args.get("untie_embeddings_and_output_weights"),
    )
    _check_head_norms(model)
    return model


def _activation(args: Mapping[str, Any]) -> Any:
    """Megatron-LM's fused GELU with bias, its default, is the tanh approximation; the unfused one is exact."""
    if args.get("swiglu"):
        return "swiglu"
    return "gelu_tanh" if args.get("bias_gelu_fusion") and _biased(args) else "gelu"


def _biased(args: Mapping[str, Any]) -> bool:
    return bool(args.get("add_bias_linear", not args.get("disable_bias_linear")))


def _rope(args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if args.get("rotary_base") is not None:
        found["rope_theta"] = _typed("rotary_base", args["rotary_base"], float)
    if args.get("use_rope_scaling"):
        factor = args.get("rope_scaling_factor")
        factor = LLAMA3.factor if factor is None else _typed("rope_scaling_factor", factor, float)
        found["rope_scaling"] = RopeScaling(**{**vars(LLAMA3), "factor": factor})
    return found


def _vocabulary(args: Mapping[str, Any]) -> int:
    if args.get("vocab_size") is None:
        raise ConfigError(
            f"its args do not say how large the vocabulary is, only that it was padded to "
            f"{_shown(args.get('padded_vocab_size'))} rows. Give the tokenizer's size with --vocab-size."
        )
    # Megatron-LM's null tokenizer has one id more than its size says, for the end of documents.
    return _integer(args, "vocab_size") + (args.get("tokenizer_type") == NULL)


def _check_head_norms(model: ModelConfig) -> None:
    if model.qk_norm and model.normalization != "rmsnorm":
        raise ConfigError(
            "queries and keys are normalised by RMSNorm here and in Megatron-LM as normalization says: qk_layernorm "
            f"goes with RMSNorm, but normalization is {model.normalization}."
        )


def _number(args: Mapping[str, Any], ours: str) -> Any:
    """A number under the newest name that has one, of the type of our field."""
    for theirs in NUMBERS[ours]:
        if args.get(theirs) is not None:
            return _typed(theirs, args[theirs], type(getattr(ModelConfig(), ours)))
    return None


def _integer(args: Mapping[str, Any], name: str) -> int:
    value: int = _typed(name, args.get(name), int)
    return value


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} in its args must be {kind.__name__}, not {_shown(value)}.")
    return value


def _word(name: str, values: Mapping[str, str], value: Any) -> str:
    if not isinstance(value, str) or value not in values:
        raise ConfigError(
            f"its args ask for what is not built here: {name} is {_shown(value)} (what works is "
            f"{listed(values, 'or')})."
        )
    return values[value]


def _is_one_of(value: Any, legal: tuple[Any, ...]) -> bool:
    """Whether a setting, which may be anything, has one of the values."""
    return any(value is item or (type(value) in (int, float, str) and value == item) for item in legal)


def _shown(value: object) -> str:
    """A value of args, cut if it is long."""
    text = repr(value) if isinstance(value, int | float | str | bool | list | tuple | None) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def args_of(model: ModelConfig) -> dict[str, Any]:
    """The `args` that describe a resolved `model`, without what is said of its layout.

    ConfigError for a model that Megatron-LM cannot express.
    """
    _check_head_norms(model)
    _check_expressible(model)
    written: dict[str, Any] = {name: legal[0] for name, legal in ONLY.items()}
    written |= {theirs: getattr(model, ours) for ours, spellings in NUMBERS.items() for theirs in spellings}
    for ours, (theirs, values, _) in WORDED.items():
        written[theirs] = next(word for word, meaning in values.items() if meaning == getattr(model, ours))
    scaling = model.rope_scaling
    return written | {
        "num_query_groups": model.num_query_groups,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "vocab_size": model.vocab_size,
        "swiglu": model.activation == "swiglu",
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "add_bias_linear": model.bias == "all",
        "add_qkv_bias": model.bias == "qkv",
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "rotary_base": int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta,
        "use_rope_scaling": scaling is not None,
        "rope_scaling_factor": LLAMA3.factor if scaling is None else scaling.factor,
        "attention_dropout": 0.0,
        "add_position_embedding": True,
        "data_parallel_random_init": False,
    }


def tokenizer_args(tokenizer_type: str, model: ModelConfig) -> dict[str, Any]:
    """The `args` of a tokenizer, which goes with the vocabulary of a resolved `model`."""
    return {"tokenizer_type": tokenizer_type, "vocab_size": model.vocab_size - (tokenizer_type == NULL)}


def _check_expressible(model: ModelConfig) -> None:
    if model.activation == "gelu_tanh" and model.bias != "all":
        raise ConfigError(
            f"Megatron-LM has the tanh form of GELU only where all linear layers have biases, and the model has bias "
            f"{model.bias}. Write it as a Hugging Face model instead."
        )
    scaling = model.rope_scaling
    if scaling is not None and vars(scaling) | {"factor": 0} != vars(LLAMA3) | {"factor": 0}:
        raise ConfigError(
            f"Megatron-LM's rope scaling has low_freq_factor 1.0, high_freq_factor 4.0 and original_max_position 8192, "
            f"the model {scaling.low_freq_factor}, {scaling.high_freq_factor} and {scaling.original_max_position}. "
            "Write it as a Hugging Face model instead."
        )
