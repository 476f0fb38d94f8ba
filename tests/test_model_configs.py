"""Every file of model_configs/ loads, resolves, and has the published number of parameters."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from megatron3d.cli import MODEL_CONFIGS
from megatron3d.config import Config, ModelConfig, RopeScaling
from megatron3d.config_io import load_toml
from megatron3d.params import num_parameters, param_table
from megatron3d.validate import resolve

DATA = Path(__file__).parent / "data"
FILES = sorted(MODEL_CONFIGS.glob("*.toml"))
NAMES = {
    "Llama-2-7B": "llama2-7b",
    "Llama-2-13B": "llama2-13b",
    "Llama-2-70B": "llama2-70b",
    "Llama-3-8B": "llama3-8b",
    "Llama-3-70B": "llama3-70b",
    "Llama-3.1-405B": "llama3-405b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Mistral-7B-v0.1": "mistral-7b-v0.1",
    "GPT-2 124M": "gpt2-124m",
    "GPT-2 355M": "gpt2-355m",
    "GPT-2 774M": "gpt2-774m",
    "GPT-2 1.5B": "gpt2-1.5b",
}


def rows(file: str) -> list[dict[str, str]]:
    with (DATA / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def resolved(name: str) -> Config:
    return resolve(load_toml(MODEL_CONFIGS / f"{name}.toml"), world_size=1)


def count(model: ModelConfig) -> int:
    return num_parameters(param_table(model))


def test_all_models_are_there() -> None:
    published = {"gpt3-175b", "qwen3-8b", *NAMES.values()}
    assert {path.stem for path in FILES} == {"tiny", "demo", *published}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_resolves_and_sources_its_numbers(path: Path) -> None:
    config = resolve(load_toml(path), world_size=1)
    assert resolve(config, world_size=1) == config
    text = path.read_text()
    assert text.startswith("# ")
    if path.stem not in ("tiny", "demo"):  # the sizes of those are ours
        section = text.partition("[model.rope_scaling]  ")[0]  # one source for that whole table
        numbers = re.findall(r"^\w+ = [\d.].*", section, re.MULTILINE)
        assert len(numbers) > 8 and all("  # " in line for line in numbers)


@pytest.mark.parametrize("row", rows("models_golden.csv"), ids=lambda row: row["model"])
def test_model_equals_the_published_one(row: dict[str, str]) -> None:
    model = resolved(NAMES[row["model"]]).model
    assert count(model) == int(row["params_total"])
    shape = (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads)
    assert shape == tuple(int(row[key]) for key in ("layers", "hidden", "ffn", "heads"))
    assert model.num_query_groups == int(row["kv_heads"])
    assert model.head_dim == int(row["head_dim"])
    assert model.max_position == int(row["max_ctx"])
    assert model.tied_embeddings == (row["tied_embeddings"] == "yes")
    assert model.bias == {"no": "none"}.get(row["bias"], row["bias"])
    assert not row["rope_theta"] or model.rope_theta == float(row["rope_theta"])


@pytest.mark.parametrize("row", rows("gpt3_table21.csv"), ids=lambda row: row["name"])
def test_gpt3_family_has_the_published_sizes(row: dict[str, str]) -> None:
    """Counted with the width of the model as the width of all heads, which two printed rows contradict."""
    gpt3 = resolved("gpt3-175b").model
    layers, hidden, heads = int(row["layers"]), int(row["d_model"]), int(row["heads"])
    if row["note"]:
        heads = 1  # the count does not depend on it
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=gpt3.vocab_size,
        seq_length=gpt3.seq_length,
        activation=gpt3.activation,
        normalization=gpt3.normalization,
        position_embedding=gpt3.position_embedding,
        bias=gpt3.bias,
        tied_embeddings=gpt3.tied_embeddings,
    )
    assert count(resolve(Config(model=model), world_size=1).model) == int(row["params_computed"])
    if row["name"] == "175B":
        assert count(gpt3) == int(row["params_computed"])


def test_qwen3_by_hand() -> None:
    """No table has this one: 36 layers of q, k, v, o, a gated MLP, two norms of 4096 and two of one head's width."""
    attention = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128
    layer = attention + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert count(resolved("qwen3-8b").model) == 36 * layer + 4096 + 2 * 151936 * 4096 == 8_190_735_360


def test_llama31_scales_its_rotary_frequencies() -> None:
    scaling = resolved("llama3-405b").model.rope_scaling
    assert scaling == RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
