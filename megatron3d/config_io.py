"""A `Config` in and out: TOML text for people, plain dictionaries for JSON.

The one idea: the dataclasses of config.py are the schema. Reading walks their type hints, so a new field needs nothing
here, and whatever does not fit (an unknown key, a wrong type) is refused by name. Values are judged in validate.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from megatron3d.config import Config, ConfigError
from megatron3d.words import did_you_mean

T = TypeVar("T")

EXPECTED = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list of integers",
}


def load_toml(path: Path, base: Config | None = None) -> Config:
    """`base` (default: all defaults) overlaid by the TOML file at `path`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"Cannot read the config file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The config file {path} is not UTF-8 text.") from None
    return from_toml(text, base, source=str(path))


def from_toml(text: str, base: Config | None = None, *, source: str = "the TOML text") -> Config:
    """`base` overlaid by `text`; `source` names the text in errors."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, endless brackets
        raise ConfigError(f"{source} is not valid TOML: {error}.") from None
    return from_dict(tables, base, source=source)


def from_dict(tables: Mapping[str, Any], base: Config | None = None, *, source: str = "the saved config") -> Config:
    """`base` overlaid by nested dictionaries, as `to_dict` or a JSON or TOML parser makes them.

    Raises ConfigError naming `source`, the key, the value and what was expected. None is read as None, and only where
    the field allows it.
    """
    return _read_table(Config, base or Config(), tables, source, ())


def to_dict(config: Config) -> dict[str, Any]:
    """Nested dictionaries of JSON types, the inverse of `from_dict`."""
    return dataclasses.asdict(
        config, dict_factory=lambda items: {key: list(v) if isinstance(v, tuple) else v for key, v in items}
    )


def to_toml(config: Config, *sections: str) -> str:
    """TOML text with every setting, or those of some sections; `from_toml` gives an equal config back. Settings that
    are None are left out."""
    tables = to_dict(config)
    return "\n".join(line for section in sections or tables for line in _write_table(section, tables[section]))


def _read_table(cls: type[T], old: T | None, table: object, source: str, path: tuple[str, ...]) -> T:
    """An instance of the dataclass `cls`: `old` overlaid by `table`; without `old`, the table must be complete."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: {_place(path)} must be a table, not {table!r}.")
    hints = get_type_hints(cls)
    values = {name: getattr(old, name) for name in hints} if old is not None else {}
    for key, value in table.items():
        if key not in hints:
            raise ConfigError(f"{source}: {_unknown_key(key, hints, path)}")
        values[key] = _read_value(hints[key], values.get(key), value, source, (*path, key))
    if missing := [name for name in hints if name not in values]:
        raise ConfigError(f"{source}: {_place(path)} needs all of {', '.join(hints)}, but lacks {', '.join(missing)}.")
    return cls(**values)


def _read_value(hint: Any, old: Any, value: Any, source: str, path: tuple[str, ...]) -> Any:
    """`value` as an instance of the type `hint`."""
    if get_origin(hint) is UnionType:  # X | None
        if value is None:
            return None
        (hint,) = (arg for arg in get_args(hint) if arg is not NoneType)
    if dataclasses.is_dataclass(hint):
        return _read_table(hint, old, value, source, path)  # type: ignore[arg-type]
    kind = get_origin(hint) or hint
    if kind is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
            choices = ", ".join(map(repr, get_args(hint)))
            raise ConfigError(f"{source}: {_place(path)} must be one of {choices}, not {value!r}.")
        return value
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is tuple and isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    if type(value) is not kind or kind is tuple:  # not isinstance: true is no integer here
        raise ConfigError(f"{source}: {_place(path)} must be {EXPECTED[kind]}, not {value!r}.")
    return value


def _place(path: tuple[str, ...]) -> str:
    """("model", "rope_scaling", "factor") -> "[model.rope_scaling] factor"; () -> "it"."""
    if not path:
        return "it"
    return f"[{'.'.join(path[:-1])}] {path[-1]}" if len(path) > 1 else f"[{path[0]}]"


def _unknown_key(key: str, known: Collection[str], path: tuple[str, ...]) -> str:
    """What to say about a key that its table does not have."""
    hint = did_you_mean(str(key), known)
    for section in dataclasses.fields(Config):
        if key in get_type_hints(section.default_factory):
            hint = f" It belongs to [{section.name}]."
    where = f"in [{'.'.join(path)}]" if path else "as a section"
    return f"there is no {key!r} {where}.{hint or ' Known: ' + ', '.join(known) + '.'}"


def _write_table(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Lines of one section, its sub-tables last, each with an empty line behind it."""
    yield f"[{name}]"
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    for key, value in table.items():
        if value is not None and key not in nested:
            # JSON's notation is TOML's for these types, but that TOML wants DEL escaped and spells inf and nan its way.
            text = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
            yield f"{key} = {text}".replace("\x7f", "\\u007f")
    yield ""
    for key, value in nested.items():
        yield from _write_table(f"{name}.{key}", value)
