"""Settings as TOML and as dictionaries: exact round trips, and a readable refusal of whatever does not fit."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron3d.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RopeScaling,
    RunConfig,
)
from megatron3d.config_io import from_dict, from_toml, load_toml, to_dict, to_toml

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
UNUSUAL = Config(
    model=ModelConfig(num_layers=7, rope_scaling=SCALING, norm_epsilon=1e-6, qk_norm=True, activation="gelu_tanh"),
    parallel=ParallelConfig(tp=2, pp=2, sp=False, stage_layers=(5, 2), zero=0, overlap=False),
    optim=OptimConfig(lr=1e16, min_lr=5e-324, beta2=0.1 + 0.2),
    data=DataConfig(data_path='a "quoted"\\\tpath\x7f\x01 é 😀', split="1,0,0"),
    run=RunConfig(seed=2**63 - 1),
)


@pytest.mark.parametrize("config", [Config(), UNUSUAL], ids=["default", "unusual"])
def test_toml_and_json_round_trip_exactly(config: Config) -> None:
    assert from_toml(to_toml(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    number=st.floats(allow_nan=False),
    layers=st.lists(st.integers()),
    switch=st.sampled_from([None, True, False]),
)
def test_any_value_round_trips(text: str, number: float, layers: list[int], switch: bool | None) -> None:
    config = Config(
        parallel=ParallelConfig(stage_layers=tuple(layers), sp=switch),
        optim=OptimConfig(lr=number),
        checkpoint=CheckpointConfig(save=text),
    )
    assert from_toml(to_toml(config)) == config


def test_toml_names_every_section() -> None:
    sections = [line for line in to_toml(Config()).splitlines() if line.startswith("[")]
    assert sections == [f"[{field.name}]" for field in fields(Config)]


def test_toml_overlays_a_base() -> None:
    base = replace(Config(), optim=OptimConfig(lr=0.5, beta1=0.8))
    config = from_toml("[optim]\nlr = 1\n[parallel]\nstage_layers = [3, 1]\nsp = true\n", base)
    assert config.optim == OptimConfig(lr=1.0, beta1=0.8)
    assert isinstance(config.optim.lr, float)  # an integer is a number too
    assert config.parallel == ParallelConfig(stage_layers=(3, 1), sp=True)
    assert config.model == base.model


def test_scaling_is_a_table_of_the_model() -> None:
    whole = (
        "[model.rope_scaling]\nfactor = 8\nlow_freq_factor = 1\nhigh_freq_factor = 4\noriginal_max_position = 8192\n"
    )
    config = from_toml(whole)
    assert config.model.rope_scaling == SCALING
    again = from_toml("[model.rope_scaling]\nfactor = 32.0\n", config)
    assert again.model.rope_scaling == replace(SCALING, factor=32.0)


WRONG_TOML = [
    ("[modle]\n", ["'modle'", "Did you mean model?"]),
    ("[model]\nnum_layer = 2", ["'num_layer'", "[model]", "Did you mean num_layers?"]),
    ("[model]\nzzz = 2", ["'zzz'", "[model]", "Known:", "hidden_size"]),
    ("[model]\ntp = 2", ["'tp'", "[model]", "belongs to [parallel]"]),
    ("tp = 2", ["'tp'", "belongs to [parallel]"]),
    ("model = 3", ["[model]", "a table", "3"]),
    ("[model]\nnum_layers = 'four'", ["[model] num_layers", "an integer", "'four'"]),
    ("[model]\nnum_layers = 4.0", ["[model] num_layers", "an integer", "4.0"]),
    ("[model]\nnum_layers = true", ["[model] num_layers", "an integer", "True"]),
    ("[optim]\nlr = true", ["[optim] lr", "a number", "True"]),
    ("[optim]\nlr = '3e-4'", ["[optim] lr", "a number", "'3e-4'"]),
    ("[model]\nqk_norm = 1", ["[model] qk_norm", "true or false", "1"]),
    ("[parallel]\nsp = 'yes'", ["[parallel] sp", "true or false", "'yes'"]),
    ("[parallel]\nzero = 2", ["[parallel] zero", "0, 1", "2"]),
    ("[parallel]\nzero = true", ["[parallel] zero", "0, 1", "True"]),
    ("[model]\nactivation = 'relu'", ["[model] activation", "'swiglu'", "'relu'"]),
    ("[data]\ndata_path = 3", ["[data] data_path", "a string", "3"]),
    ("[parallel]\nstage_layers = '3,1'", ["[parallel] stage_layers", "a list of integers", "'3,1'"]),
    ("[parallel]\nstage_layers = [3, 1.0]", ["[parallel] stage_layers", "a list of integers", "1.0"]),
    ("[model]\nrope_scaling = 8.0", ["[model] rope_scaling", "a table", "8.0"]),
    ("[model.rope_scaling]\nfactor = 8", ["[model] rope_scaling", "lacks low_freq_factor"]),
    ("[model.rope_scaling]\nfactr = 8", ["'factr'", "[model.rope_scaling]", "Did you mean factor?"]),
    ("[model.rope_scaling]\nfactor = 'x'", ["[model.rope_scaling] factor", "a number", "'x'"]),
    ("[optim]\nlr = 1" + "0" * 400, ["[optim] lr", "a number"]),
    ("[run]\nseed = 1" + "0" * 5000, ["not valid TOML"]),
    ("a = " + "[" * 20_000, ["not valid TOML"]),
    ("[[model]]\n", ["[model]", "a table"]),
    ("[model\n", ["not valid TOML", "line 1"]),
    ("[model]\nnum_layers = 4\nnum_layers = 5\n", ["not valid TOML", "line 3"]),
]


@pytest.mark.parametrize(("text", "wanted"), WRONG_TOML)
def test_wrong_toml_is_refused_by_name(text: str, wanted: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_toml(text, source="run.toml")
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in ["run.toml", *wanted] if word not in message] == []


def test_load_toml_names_the_file(tmp_path: Path) -> None:
    good, wrong, binary = tmp_path / "good.toml", tmp_path / "wrong.toml", tmp_path / "binary.toml"
    good.write_text("\ufeff[run]\r\nseed = 7\r\n", encoding="utf-8")
    wrong.write_text("[run]\nseeds = 7\n")
    binary.write_bytes(b"\xff\xfe")
    assert load_toml(good).run.seed == 7
    for path, problem in ((wrong, "Did you mean seed?"), (binary, "UTF-8"), (tmp_path / "none.toml", "No such file")):
        with pytest.raises(ConfigError, match=problem) as refusal:
            load_toml(path)
        assert str(path) in str(refusal.value)


def test_saved_config_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"the saved config: there is no 'extra' in \[run\]"):
        from_dict({"run": {"extra": 1}})
    with pytest.raises(ConfigError, match=r"\[run\] seed must be an integer, not None"):
        from_dict({"run": {"seed": None}})
    assert from_dict({"parallel": {"sp": None}, "model": {"rope_scaling": None}}) == Config()


@pytest.mark.parametrize(
    "saved",
    [None, 3, "x", [], {5: {}}, {"model": None}, {"model": []}, {"model": {5: 1}}, {"model": {"rope_scaling": {}}},
     {"parallel": {"stage_layers": ("a",)}}, {"parallel": {"zero": []}}, {"optim": {"lr": 10**400}}],
)  # fmt: skip
def test_a_saved_config_of_another_structure_is_refused(saved: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the saved config: "):
        from_dict(saved)
