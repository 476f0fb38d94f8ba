"""Train a SentencePiece tokenizer on files of text. See --help; the training itself is in megatron3d/vocabulary.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError
from megatron3d.corpus import find_files, parse, raw_documents
from megatron3d.launch import user_errors
from megatron3d.tokenizer import load_tokenizer
from megatron3d.vocabulary import sentences, train_model

SAMPLE_BYTES = 2_000_000  # text on which the bytes per token are measured, about


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    input: tuple[str, ...]
    """Files of text or JSON lines (.jsonl, .ndjson, .json), or folders of them. All text is held in memory: for a
    large corpus, a few hundred megabytes of it are enough."""
    output: str
    """The .model file to write."""
    vocab_size: int = 4096
    """Number of ids, the 256 bytes and the end-of-document piece included."""
    glob: str = "**/*.txt"
    """Files to take from a folder."""
    exclude: tuple[str, ...] = ()
    """Patterns of file names, folder names or paths to leave out of a folder."""
    json_key: str = "text"
    """Key of the text in a JSON line."""
    json: bool = False
    """Print the summary as one JSON object."""


def main(argv: Sequence[str]) -> None:
    """Train, write the model under its final name, print a summary."""
    flags = parse_tool(Flags, argv, description="Train a SentencePiece tokenizer (byte-pair pieces, byte fallback).")
    began = time.perf_counter()
    files = find_files(flags.input, flags.glob, flags.exclude)

    def documents() -> Iterator[str]:
        return (parse(document, flags.json_key) for document in raw_documents(files))

    status = Console(stderr=True).status(f"Training {flags.vocab_size} pieces on {len(files)} files")
    with written_whole(flags.output) as file, status:
        file.write(train_model(documents, flags.vocab_size))
    num_bytes = sum(len(text.encode()) for text in documents())
    summary = {
        "model": flags.output,
        "vocab_size": flags.vocab_size,
        "files": len(files),
        "bytes": num_bytes,
        "bytes_per_token": round(bytes_per_token(flags.output, documents(), -(-num_bytes // SAMPLE_BYTES)), 3),
        "seconds": round(time.perf_counter() - began, 1),
    }
    if flags.json:
        print(json.dumps(summary))
        return
    print(
        f"{flags.output}: {flags.vocab_size:,} pieces from {num_bytes / 1e6:.1f} MB of text in {len(files):,} files, "
        f"{summary['bytes_per_token']} bytes per token, {summary['seconds']} s"
    )


@contextlib.contextmanager
def written_whole(output: str) -> Iterator[BinaryIO]:
    """A file to write, which appears under its name when the block ends without an error; after one nothing is left.

    ConfigError, before the block, where it cannot be written.
    """
    path, aside = Path(output), Path(f"{output}.partial")
    if not os.path.basename(output) or path.is_dir():
        raise ConfigError(f"--output {output!r} is a folder: name the .model file to write.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = aside.open("wb")
    except OSError as error:
        raise ConfigError(
            f"Cannot write {path} ({error.strerror}). Name a file in a folder that can be written to."
        ) from None
    try:
        with file:
            yield file
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def bytes_per_token(model: str, documents: Iterator[str], every: int) -> float:
    """Measured on each `every`-th part of the text."""
    tokenizer = load_tokenizer(model)
    num_bytes = num_tokens = 0
    for part in islice((part for text in documents for part in sentences(text)), 0, None, every):
        num_bytes += len(part.encode())
        num_tokens += len(tokenizer.encode(part))
    return num_bytes / num_tokens


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
