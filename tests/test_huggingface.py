"""Settings of Hugging Face's config.json as ours and back: spellings, defaults, refusals, which family fits a model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron3d.cli import MODEL_CONFIGS
from megatron3d.config import ConfigError, ModelConfig, RopeScaling
from megatron3d.config_io import load_toml
from megatron3d.huggingface import choose_family, family_named, from_huggingface, to_huggingface
from megatron3d.huggingface_files import write_huggingface
from megatron3d.validate import resolve
from tests import hf, toy

LLAMA = {**hf.WIDE, "model_type": "llama"}


REFUSED: list[tuple[str, str, Any, str]] = [
    ("llama", "attention_bias", True, "False"),
    ("llama", "mlp_bias", True, "False"),
    ("llama", "hidden_act", "gelu", "'silu'"),
    ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}, "default or llama3"),
    ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "default or llama3"),
    ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "default or llama3"),
    ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor and high_freq_factor"),
    ("llama", "rope_parameters", {"full_attention": {"rope_theta": 1.0}}, "for all layers"),
    ("llama", "rope_theta", "high", "a number"),
    ("llama", "partial_rotary_factor", 0.5, "1.0"),
    ("llama", "rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", "quantization_config", {"bits": 4}, "without it"),
    ("llama", "auto_map", {"AutoModel": "x.Y"}, "without it"),
    ("llama", "num_hidden_layers", "2", "an integer"),
    ("llama", "num_hidden_layers", True, "an integer"),
    ("llama", "num_key_value_heads", 0, "at least 1"),
    ("llama", "num_key_value_heads", 5, "does not divide"),
    ("llama", "intermediate_size", None, "an integer"),
    ("llama", "rms_norm_eps", -1.0, "greater than 0"),
    ("llama", "rms_norm_eps", math.nan, "greater than 0"),
    ("llama", "rope_theta", 10**400, "a number"),
    ("llama", "tie_word_embeddings", "yes", "true or false"),
    ("llama", "model_type", "lama", "Did you mean llama"),
    ("llama", "model_type", None, "gpt2, llama, mistral, qwen2 and qwen3"),
    ("mistral", "layer_types", ["full_attention", "sliding_attention"], "'full_attention'"),
    ("mistral", "sliding_window", 0, "at least 1"),
    ("qwen2", "use_sliding_window", True, "False"),
    ("qwen2", "layer_types", ["sliding_attention"], "'full_attention'"),
    ("qwen3", "attention_bias", True, "False"),
    ("qwen3", "use_sliding_window", True, "False"),
    ("gpt2", "scale_attn_weights", False, "True"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "False"),
    ("gpt2", "reorder_and_upcast_attn", True, "False"),
    ("gpt2", "add_cross_attention", True, "False"),
    ("gpt2", "activation_function", "relu", "gelu_new, gelu_pytorch_tanh or gelu"),
    ("gpt2", "resid_pdrop", 0.2, "the same value"),
    ("gpt2", "pruned_heads", {"0": [1]}, "{}"),
]


@pytest.mark.parametrize(
    ("family", "name", "value", "words"), REFUSED, ids=[f"{row[0]}-{row[1]}-{row[2]!r:.30}" for row in REFUSED]
)
def test_what_cannot_be_honoured_is_refused_by_name(family: str, name: str, value: Any, words: str) -> None:
    raw: dict[str, Any] = {**(hf.GPT2 if family == "gpt2" else hf.WIDE), "model_type": family}
    from_huggingface(raw)
    with pytest.raises(ConfigError) as error:
        from_huggingface({**raw, name: value}, source="folder/config.json")
    text = str(error.value)
    assert text.startswith("folder/config.json: ") and words in text
    ours = {"rms_norm_eps": "--norm-epsilon", "num_key_value_heads": "--num-query-groups"}  # resolve knows no others
    assert any(word in text for word in (name, ours.get(name, name), "partial_rotary_factor"))


def test_both_spellings_of_transformers() -> None:
    """4.x: rope_theta, rope_scaling (type or rope_type), torch_dtype; 5.x: rope_parameters, dtype."""
    raw = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    old = {**raw, "rope_theta": 500000, "rope_scaling": hf.LLAMA3, "torch_dtype": "bfloat16"}
    older = {**old, "rope_scaling": {"type" if key == "rope_type" else key: v for key, v in hf.LLAMA3.items()}}
    new = {**raw, "rope_parameters": {**hf.LLAMA3, "rope_theta": 500000.0}, "dtype": "bfloat16"}
    models = [from_huggingface(said).config.model for said in (old, older, new)]
    assert models[0] == models[1] == models[2] and models[0].rope_theta == 500000.0
    assert models[0].rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=256
    )
    for plain in (
        {"rope_scaling": None, "rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ):
        model = from_huggingface({**raw, **plain}).config.model
        assert model.rope_scaling is None and model.rope_theta == 5e5
    assert from_huggingface(raw).config.model.rope_theta == 10000.0
    unsaid = {key: value for key, value in hf.LLAMA3.items() if key != "original_max_position_embeddings"}
    for beside, original in (({}, 96), ({"original_max_position_embeddings": 64}, 64)):
        scaling = from_huggingface({**old, "rope_scaling": unsaid, **beside}).config.model.rope_scaling
        assert scaling is not None and scaling.original_max_position == original
    with pytest.raises(ConfigError, match="original_max_position_embeddings is 256 in rope_scaling and 64 beside it"):
        from_huggingface({**old, "original_max_position_embeddings": 64})


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_missing_fields_are_what_transformers_takes(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    model = from_huggingface({"model_type": family}).config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size, model.max_position) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.vocab_size,
        config.max_position_embeddings,
    )
    assert model.num_query_groups == getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert model.head_dim == head_dim
    assert model.ffn_hidden_size == getattr(config, "intermediate_size", 4 * config.hidden_size)
    assert model.norm_epsilon == getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    assert (model.tied_embeddings, model.init_std) == (config.tie_word_embeddings, config.initializer_range)
    assert model.sliding_window == (getattr(config, "sliding_window", None) or 0)
    assert model.rope_theta == getattr(config, "rope_parameters", {"rope_theta": 10000.0})["rope_theta"]
    assert model.dropout == getattr(config, "resid_pdrop", 0.0)


def test_width_of_a_head_where_it_is_missing() -> None:
    """Qwen3's is 128 whatever the model's width is; the others' follows from it."""
    for family, width in (("llama", 32), ("mistral", 32), ("qwen2", 32), ("qwen3", 128)):
        assert from_huggingface({"model_type": family, "hidden_size": 1024}).config.model.head_dim == width


def test_a_window_bounds_the_samples() -> None:
    raw = {**hf.WIDE, "model_type": "mistral", "sliding_window": 40}
    model = from_huggingface(raw).config.model
    assert (model.seq_length, model.sliding_window, model.max_position) == (40, 40, 96)
    with pytest.raises(ConfigError, match="sliding window of 40"):
        from_huggingface(raw, seq_length=41)
    with pytest.raises(ConfigError, match="longest context"):
        from_huggingface(LLAMA, seq_length=97)


def test_notes_tell_what_is_taken_over_and_what_is_not() -> None:
    """NUM-14: dropout comes from config.json, and is told."""
    assert from_huggingface({**LLAMA, "use_cache": True, "pretraining_tp": 1}).notes == ()
    assert from_huggingface({**LLAMA, "logit_scale": 2.0}).notes == (
        "These fields of config.json are not known here and change nothing: logit_scale.",
    )
    (note,) = from_huggingface({**LLAMA, "attention_dropout": 0.1}).notes
    assert "attention_dropout is 0.1" in note
    imported = from_huggingface({**hf.GPT2, "model_type": "gpt2"})
    assert imported.config.model.dropout == 0.1
    assert [note.split(" is ")[0] for note in imported.notes] == ["dropout", "attn_pdrop"]
    assert "embd_pdrop and resid_pdrop" in imported.notes[0]


def test_dropout_that_a_family_cannot_say_is_told(tmp_path: Path) -> None:
    assert "dropout 0.25" in write_huggingface(hf.native(dropout=0.25), tmp_path / "a", token_ids=hf.IDS)[0]
    assert write_huggingface(hf.native(toy.GPT2, dropout=0.25), tmp_path / "b", token_ids=hf.IDS) == ()
    said = json.loads((tmp_path / "b" / "config.json").read_text())
    assert [said[name] for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")] == [0.25, 0.25, 0.0]


@pytest.mark.parametrize("path", sorted(MODEL_CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_each_model_file_is_of_its_family(path: Path) -> None:
    """And its settings come back as they were."""
    model = resolve(load_toml(path), world_size=1).model
    start = path.stem.replace("gpt3", "gpt2").replace("qwen2.5", "qwen2")
    family = choose_family(model)
    assert start.startswith(family.name) or (family.name, path.stem) in (("llama", "tiny"), ("llama", "demo"))
    back = from_huggingface(json.loads(json.dumps(to_huggingface(model, family))), seq_length=model.seq_length)
    assert back.config.model == model


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"sliding_window": 32}, "mistral"),
        ({"hidden_size": 66, "head_dim": 16}, "mistral"),
        ({"bias": "qkv"}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
    ],
)
def test_the_family_follows_from_the_model(changes: dict[str, Any], family: str) -> None:
    model = hf.native(**changes).config.model
    assert choose_family(model).name == family
    assert choose_family(model, remembered="gpt2").name == family
    assert choose_family(model, remembered=["?"]).name == family


def test_a_remembered_family_wins_where_it_fits() -> None:
    model = hf.native().config.model
    assert choose_family(model, remembered="mistral").name == "mistral"
    assert choose_family(model, asked="llama", remembered="mistral").name == "llama"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (replace(toy.LLAMA, bias="all"), "as llama: bias is all and would be none. No other"),
        (replace(toy.LLAMA, bias="qkv", qk_norm=True), "as qwen2: qk_norm is True and would be False. No other"),
        (
            replace(toy.LLAMA, qk_norm=True, sliding_window=32),
            "as mistral: qk_norm is True and would be False. No other",
        ),
        (replace(toy.LLAMA, normalization="layernorm"), "normalization is layernorm and would be rmsnorm"),
        (replace(toy.GPT2, num_query_groups=2), "as gpt2: num_query_groups is 2 and would be 4. No other"),
        (replace(toy.GPT2, head_dim=8), "as gpt2: head_dim is 8 and would be 16. No other"),
        (replace(toy.GPT2, bias="none"), "as gpt2: bias is none and would be all"),
    ],
)
def test_a_model_that_no_family_has_is_refused(model: ModelConfig, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        write_huggingface(hf.native(model), tmp_path / "out")
    assert words in str(error.value) and not list(tmp_path.iterdir())


def test_a_family_asked_for_must_fit() -> None:
    model = hf.native(qk_norm=True).config.model
    with pytest.raises(
        ConfigError, match=r"as llama: qk_norm is True and would be False\. What can express it is qwen3"
    ):
        choose_family(model, asked="llama")
    with pytest.raises(ConfigError, match="Did you mean qwen3"):
        choose_family(model, asked="qwen33")
    assert family_named("qwen3").architecture == "Qwen3ForCausalLM"
