"""The files of a tokenizer of Hugging Face's: tokenizer.json, and those beside it that name its special tokens.

The one idea: what a run keeps of such a tokenizer is what is read of it later, so both are told here, by paths and JSON
alone. What the tokenizer does with a text is in tokenizer.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron3d.config import ConfigError
from megatron3d.index import read_plain

TOKENIZER_JSON = "tokenizer.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
"""Files of transformers that name special tokens; the first that names one counts."""
UNWANTED = ("truncation", "padding", "post_processor")  # would leave out or add tokens
RANDOM = ("dropout", "alpha", "nbest_size")  # of a model: would give a text other tokens each time


def is_tokenizer_json(spec: str) -> bool:
    """Whether `--tokenizer` names such a file, by the end of its name."""
    return spec.endswith(".json")


def files_of(path: Path) -> dict[str, bytes]:
    """The files by the names under which transformers, and `load_tokenizer`, find them."""
    beside = [file for file in map(path.with_name, BESIDE) if file.is_file()]
    return {TOKENIZER_JSON: path.read_bytes(), **{file.name: file.read_bytes() for file in beside}}


def definition_of(path: Path) -> dict[str, Any]:
    """The object in the file, with nothing in it that would change a text's tokens. ConfigError where it is not one."""
    content = _read(path)
    if not isinstance(content.get("model"), dict):
        raise ConfigError(f"{path} is no tokenizer of Hugging Face's: it has no model. Give its {TOKENIZER_JSON}.")
    model = {name: None if name in RANDOM else value for name, value in content["model"].items()}
    return {**content, **dict.fromkeys(UNWANTED), "model": model}


def end_token(path: Path) -> str:
    """What a file beside it calls eos_token; empty where none does. ConfigError for one that cannot be read."""
    for file in map(path.with_name, BESIDE):
        token = _read(file).get("eos_token") if file.is_file() else None
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str) and name:
            return name
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_plain(path))
    except OSError as error:
        raise ConfigError(f"The tokenizer {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON, as a tokenizer's files are: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, as a tokenizer's files do, not {type(content).__name__}.")
    return content
