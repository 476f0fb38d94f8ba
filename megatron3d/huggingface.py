"""Hugging Face's model families: how each names its tensors, and its config.json as a ModelConfig and back.

The one idea: a family is a table (names of modules, names of settings, what transformers takes for a missing one, what
must not be otherwise), and whether it can express a model is found by writing the model's settings and reading them
back: whatever comes back changed is what the family lacks. Folders and tensors are in huggingface_files.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron3d.config import Config, ConfigError, ModelConfig, RopeScaling
from megatron3d.config_io import EXPECTED
from megatron3d.huggingface_families import FAMILIES, INERT, NULLABLE, TOKEN_IDS, TRANSLATED, VALUES, Family
from megatron3d.validate import resolve
from megatron3d.words import did_you_mean, listed

NOTHING: Mapping[str, Any] = MappingProxyType({})
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""Of rope_scaling, type llama3: their key -> field of RopeScaling."""


class Imported(NamedTuple):
    """What a config.json says."""

    family: Family
    config: Config
    """Resolved; all but the model is the default."""
    notes: tuple[str, ...]
    """What the user should know: settings that act on training, or that are not built or not known."""


# Reading --------------------------------------------------------------------------------------------------------------


def from_huggingface(raw: Mapping[str, Any], *, source: str = "config.json", seq_length: int = 0) -> Imported:
    """The model that the fields `raw` describe; `source` names them in errors.

    `seq_length`: of the training to come; 0: as long as the model's context and window allow. ConfigError names the
    field that cannot be honoured, its value and the values that can.
    """
    try:
        family = family_named(raw.get("model_type"))
        model = _model(raw, family)
        longest = min(model.max_position, model.sliding_window or model.max_position)
        config = resolve(Config(model=replace(model, seq_length=seq_length or longest)), world_size=1)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return Imported(family, config, tuple(_notes(raw, family, config.model)))


def family_named(name: object) -> Family:
    """The family whose model_type is `name`."""
    for family in FAMILIES:
        if family.name == name:
            return family
    known = [family.name for family in FAMILIES]
    hint = did_you_mean(name, known) if isinstance(name, str) else ""
    raise ConfigError(f"model_type is {_shown(name)}, and the families known here are {listed(known, 'and')}.{hint}")


def _model(raw: Mapping[str, Any], family: Family) -> ModelConfig:
    """The unresolved model; seq_length is left at its default."""
    for name, legal in family.only.items():
        _check_only(name, raw.get(name), legal)
    settings: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for theirs, ours in family.fields.items():
        value = _value(theirs, ours, raw.get(theirs, family.defaults[theirs]))
        if ours in said_by and settings[ours] != value:
            raise ConfigError(
                f"{theirs} is {value} and {said_by[ours]} {settings[ours]}, but there is one {ours} for both. Give "
                "them the same value."
            )
        settings[ours], said_by[ours] = value, theirs
    if family.rotary:
        settings |= _rope(raw, settings["max_position"])
    return ModelConfig(**settings, **family.fixed)


def _check_only(name: str, value: object, legal: tuple[object, ...]) -> None:
    """`value`, or each value of a list, is one that the model here has; None stands for a missing one."""
    found = value if isinstance(value, list) else [value]
    wrong = [item for item in found if item is not None and item not in legal]
    if wrong:
        choices = [_shown(item) for item in legal if item is not None]
        what = (
            f"What works is {listed(choices, 'or')}, or to leave it out" if choices else "Only a file without it works"
        )
        raise ConfigError(f"{name} is {_shown(wrong[0])}, which is not built here. {what}.")


def _value(theirs: str, ours: str, value: Any) -> Any:
    """One of their values as ours, of the right type."""
    if theirs in VALUES:
        if not isinstance(value, str) or value not in VALUES[theirs]:
            raise ConfigError(
                f"{theirs} is {_shown(value)}, which is not built here. What works is {listed(VALUES[theirs], 'or')}."
            )
        return VALUES[theirs][value]
    if value is None and theirs in NULLABLE:
        return 0  # ours for "follows from the others"
    value = _typed(theirs, value, type(getattr(ModelConfig(), ours)))
    if type(value) is int and value < 1:
        raise ConfigError(f"{theirs} is {value}, but it must be at least 1.")
    return value


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} must be {EXPECTED[kind]}, not {_shown(value)}.")
    return value


def _rope(raw: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """rope_theta and rope_scaling, as transformers 4 (both) or 5 (rope_parameters) spells them."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    said = raw.get(name) or {}
    if not isinstance(said, Mapping) or any(isinstance(value, Mapping) for value in said.values()):
        raise ConfigError(f"{name} is {_shown(said)}; what works is one set of values for all layers.")
    for place in (raw, said):
        _check_only("partial_rotary_factor", place.get("partial_rotary_factor"), (1.0,))
    theta = next((place["rope_theta"] for place in (said, raw) if place.get("rope_theta") is not None), 10000.0)
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"{name} has the type {_shown(kind)}, which is not built here. What works is default or llama3."
        )
    scaling = _scaling(name, said, raw, max_position) if kind == "llama3" else None
    return {"rope_theta": _typed("rope_theta", theta, float), "rope_scaling": scaling}


def _scaling(name: str, said: Mapping[str, Any], raw: Mapping[str, Any], max_position: int) -> RopeScaling:
    """Of type llama3. The original length may stand within `said` or beside it; else it is the longest context."""
    original = "original_max_position_embeddings"
    lengths = [place[original] for place in (said, raw) if place.get(original) is not None] or [max_position]
    if lengths[0] != lengths[-1]:
        raise ConfigError(f"{original} is {lengths[0]} in {name} and {lengths[-1]} beside it. Leave one of them.")
    said = {**said, original: lengths[0]}
    if missing := [key for key in SCALING if said.get(key) is None]:
        raise ConfigError(f"{name} of type llama3 lacks {listed(missing, 'and')}.")
    kinds = {key: int if key == original else float for key in SCALING}
    return RopeScaling(**{ours: _typed(f"{name}: {key}", said[key], kinds[key]) for key, ours in SCALING.items()})


def _notes(raw: Mapping[str, Any], family: Family, model: ModelConfig) -> Iterator[str]:
    if model.dropout:
        names = [theirs for theirs, ours in family.fields.items() if ours == "dropout"]
        yield f"dropout is {model.dropout} in training, as {listed(names, 'and')} of the model's config.json say."
    name = family.attention_dropout
    if rate := raw.get(name, family.defaults.get(name)):
        yield f"{name} is {_shown(rate)}, but attention has no dropout here: training goes on without it."
    if unknown := sorted(raw.keys() - TRANSLATED - INERT - {name}):
        yield f"These fields of config.json are not known here and change nothing: {listed(unknown, 'and')}."


def _shown(value: object) -> str:
    """A value of config.json, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Writing --------------------------------------------------------------------------------------------------------------


def to_huggingface(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The fields that describe a resolved `model`, in the spelling that every release of transformers reads."""
    written: dict[str, Any] = {"model_type": family.name, "architectures": [family.architecture]}
    for theirs, ours in family.fields.items():
        value = getattr(model, ours)
        if theirs in VALUES:
            words = [word for word, meaning in VALUES[theirs].items() if meaning == value]
            written |= {theirs: words[0]} if words else {}
        else:
            written[theirs] = None if value == 0 and theirs in NULLABLE else value
    written |= {name: legal[0] for name, legal in family.only.items() if legal[0] is not None}
    if family.rotary:
        written |= {"rope_theta": model.rope_theta, "rope_scaling": _their_scaling(model.rope_scaling)}
    return written


def _their_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": "llama3", **{key: getattr(scaling, ours) for key, ours in SCALING.items()}}


def exported_config(
    model: ModelConfig,
    family: Family,
    *,
    dtype: str,
    remembered: Mapping[str, Any] = NOTHING,
    token_ids: Mapping[str, int] = NOTHING,
) -> dict[str, Any]:
    """A whole config.json. `remembered`: an earlier one, of which all is kept that the model does not decide;
    `token_ids`: bos_token_id, eos_token_id, pad_token_id. Those unknown are null, lest transformers assume some."""
    for name, number in token_ids.items():
        if name not in TOKEN_IDS or not 0 <= number < model.vocab_size:
            raise ConfigError(
                f"{name} {number}: what can be given is {listed(TOKEN_IDS, 'and')}, from 0 to {model.vocab_size - 1}."
            )
    kept = {name: value for name, value in remembered.items() if name not in TRANSLATED}
    unsaid = {**dict.fromkeys(TOKEN_IDS), family.attention_dropout: 0.0}
    return {**to_huggingface(model, family), "torch_dtype": dtype, **unsaid, **kept, **token_ids}


def choose_family(model: ModelConfig, asked: str | None = None, remembered: object = None) -> Family:
    """The family to write a resolved `model` as: the one `asked` for, else the one `remembered` from an import if it
    fits, else the first that can express the model. ConfigError names the settings that none can."""
    lacking = {family.name: unexpressed(family, model) for family in FAMILIES}
    if asked is not None:
        name = family_named(asked).name
    elif isinstance(remembered, str) and lacking.get(remembered) == []:
        name = remembered
    else:
        name = min(lacking, key=lambda name: len(lacking[name]))  # of equals the first
    if lacking[name]:
        others = [other for other, lack in lacking.items() if not lack]
        raise ConfigError(
            f"The model cannot be written as {name}: {listed(lacking[name], 'and')}. "
            + (f"What can express it is {listed(others, 'or')}." if others else "No other family is nearer to it.")
        )
    return family_named(name)


def unexpressed(family: Family, model: ModelConfig) -> list[str]:
    """What of a resolved `model` the family cannot say, in words; dropout, which acts in training only, is left out."""
    if family.even_heads and model.hidden_size % model.num_attention_heads:
        return [
            f"hidden_size {model.hidden_size} must there be a multiple of num_attention_heads "
            f"{model.num_attention_heads}"
        ]
    back = _model(to_huggingface(model, family), family)
    back = replace(
        back,
        num_query_groups=back.num_query_groups or back.num_attention_heads,
        head_dim=back.head_dim or back.hidden_size // back.num_attention_heads,
        seq_length=model.seq_length,
        dropout=model.dropout,
    )
    names = [
        field.name for field in dataclasses.fields(model) if getattr(model, field.name) != getattr(back, field.name)
    ]
    return [f"{name} is {getattr(model, name)} and would be {getattr(back, name)}" for name in names]
