"""Sample text from a checkpoint on one process, whatever layout saved it. See --help; sampling is in inference.py."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron3d.cli import parse_tool
from megatron3d.config import Config, ConfigError
from megatron3d.launch import user_errors
from megatron3d.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    load: str
    """Checkpoint folder, as given to --save."""
    tokenizer: str = ""
    """A SentencePiece model file, a tokenizer.json of Hugging Face's, or `byte`; default: the one the run was trained
    with."""
    prompt: str = ""
    """Text to continue; empty: begin a new document."""
    max_new_tokens: int = 128
    """Tokens to sample."""
    temperature: float = 0.8
    """Below 1 likelier, above 1 wilder; 0: always the likeliest token."""
    top_k: int = 0
    """Draw among so many likeliest tokens; 0: all."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print one JSON object: prompt, text, ids, step."""


def main(argv: Sequence[str]) -> None:
    """Loads, samples, prints."""
    flags = parse_tool(Flags, argv, description="Sample text from a checkpoint, on one process.")
    if flags.max_new_tokens < 1 or not 0 <= flags.temperature < math.inf or flags.top_k < 0:
        raise ConfigError(
            f"--max-new-tokens {flags.max_new_tokens} must be at least 1, --temperature {flags.temperature} and "
            f"--top-k {flags.top_k} at least 0 and finite."
        )
    from megatron3d.checkpoint import load_weights
    from megatron3d.index import COMPANIONS
    from megatron3d.inference import sample
    from megatron3d.mesh import Mesh
    from megatron3d.resume import saved_config
    from megatron3d.shelf import find
    from megatron3d.trainer import build_model

    found = find(flags.load)
    config = on_one_process(saved_config(found.index))
    if flags.tokenizer:
        tokenizer = load_tokenizer(flags.tokenizer)
    else:
        tokenizer = tokenizer_of_run(config, flags.load, found.path / COMPANIONS)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {config.model.vocab_size}; give the tokenizer "
            f"that the model was trained with"
        )
    parts = build_model(config, Mesh.single())
    meta = load_weights(flags.load, parts.weights)
    prompt = [tokenizer.eod, *tokenizer.encode(flags.prompt)]
    ids = list(
        sample(
            parts.stage,
            prompt,
            tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            seed=flags.seed,
        )
    )
    text = tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)
    if flags.json:
        print(json.dumps({"prompt": flags.prompt, "text": text, "ids": ids, "step": meta["step"]}))
    else:
        print(flags.prompt + text)


def tokenizer_of_run(config: Config, folder: str, companions: Path) -> Tokenizer:
    """The tokenizer that a run was trained with. ConfigError, saying where the name comes from."""
    from megatron3d.resume import kept_tokenizer

    try:
        return load_tokenizer(kept_tokenizer(config, companions))
    except ConfigError as error:
        raise ConfigError(
            f"The run that saved {folder} leaves no usable tokenizer. {error} --tokenizer overrides the run's."
        ) from None


def on_one_process(config: Config) -> Config:
    """The same model on a single process."""
    layers = (config.model.num_layers,)
    return replace(config, parallel=replace(config.parallel, tp=1, pp=1, dp=1, sp=False, stage_layers=layers))


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
