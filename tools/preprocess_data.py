"""Turn files of text into a .bin/.idx pair of token ids. See --help; the work is in megatron3d/encode.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError
from megatron3d.corpus import find_files, raw_documents
from megatron3d.encode import Encoded, Recipe, batched, encode_all
from megatron3d.indexed import IndexedWriter, token_dtype
from megatron3d.launch import user_errors
from megatron3d.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    input: tuple[str, ...]
    """Files of text (a document each) or JSON lines (.jsonl, .ndjson, .json; a document a line, blank lines ignored),
    or folders of them."""
    output: str
    """Prefix of the .bin and .idx files to write."""
    tokenizer: str
    """A SentencePiece model file, a tokenizer.json of Hugging Face's, or `byte`."""
    glob: str = "**/*.txt"
    """Files to take from a folder."""
    exclude: tuple[str, ...] = ()
    """Patterns of file names, folder names or paths to leave out of a folder."""
    json_key: str = "text"
    """Key of the text in a JSON line."""
    workers: int = 0
    """Processes that encode, 0: one per core. The result does not depend on it."""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-document id."""
    skip_bad: bool = False
    """Leave out documents that cannot be read, and count them, instead of stopping at the first."""
    json: bool = False
    """Print the summary as one JSON object."""


def main(argv: Sequence[str]) -> None:
    """Encode, write the pair under its final names, print a summary."""
    flags = parse_tool(Flags, argv, description="Turn text into token ids: a Megatron-compatible .bin/.idx pair.")
    if flags.workers < 0:
        raise ConfigError(f"--workers {flags.workers} must be a number of processes, or 0 for one per core.")
    check_prefix(flags.output)
    began = time.perf_counter()
    files = find_files(flags.input, flags.glob, flags.exclude)
    recipe = Recipe(
        tokenizer=flags.tokenizer, json_key=flags.json_key, append_eod=flags.append_eod, skip_bad=flags.skip_bad
    )
    encoded = encode_all(batched(raw_documents(files)), recipe, workers=flags.workers or os.cpu_count() or 1)
    vocab_size = load_tokenizer(flags.tokenizer).vocab_size
    with IndexedWriter(flags.output, token_dtype(vocab_size)) as writer:
        counts = write_all(writer, encoded, total=sum(file.stat().st_size for file in files))
    summary = {
        "output": flags.output,
        "dtype": writer.dtype.name,
        "vocab_size": vocab_size,
        "tokens": writer.num_tokens,
        **counts,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(summary) if flags.json else sentence(summary))


def check_prefix(output: str) -> None:
    """Refuse what is no common beginning of two file names."""
    if os.path.basename(output) in ("", ".", ".."):
        raise ConfigError(
            f"--output {output!r} is a folder, but it stands for two files. Add the name that they begin with, as in "
            f"{os.path.join(output, 'corpus')}."
        )
    if (prefix := output.removesuffix(".bin").removesuffix(".idx")) != output:
        raise ConfigError(f"--output takes what its two files have in common: {prefix} and not {output}.")


def write_all(writer: IndexedWriter, encoded: Iterable[Encoded], total: int) -> dict[str, int]:
    """Write all documents with progress over `total` bytes, and count. ConfigError if none has a token."""
    console = Console(stderr=True)
    counts = dict.fromkeys(("documents", "bytes", "empty_documents", "bad_documents"), 0)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Encoding", total=total)
        for batch in encoded:
            for ids in batch.documents():
                writer.add_document(ids)
            for reason in batch.bad:
                progress.console.print(f"skipped {reason}", markup=False, highlight=False, soft_wrap=True)
            found = (len(batch.lengths), batch.num_bytes, batch.num_empty, len(batch.bad))
            counts = {name: count + more for (name, count), more in zip(counts.items(), found, strict=True)}
            progress.advance(task, batch.num_bytes)
    if not writer.num_tokens:
        raise ConfigError(
            f"The input has no text: {counts['empty_documents']} empty and {counts['bad_documents']} unreadable "
            f"documents, none with a token. Nothing was written."
        )
    return counts


def sentence(summary: dict[str, object]) -> str:
    """The summary for people."""
    text = (
        "{output}: {documents:,} documents, {tokens:,} tokens ({dtype}) from {bytes:,} bytes, {seconds} s".format_map(
            summary
        )
    )
    for name in ("empty_documents", "bad_documents"):
        if summary[name]:
            text += f"; {summary[name]} {name.replace('_', ' ')} skipped"
    return text


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
