"""Documents of text: which files hold them, and how a file is cut into documents.

The one idea: reading is in two halves, so that the second can run in other processes. `raw_documents` walks the files
and yields undecoded documents with their place; `parse` makes text of one or says what is wrong with it. In a file of
JSON lines (.jsonl, .ndjson, .json) each line is a document, under one key of an object, and blank lines are ignored:
neither documents nor mistakes. Any other file is one document.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from megatron3d.config import ConfigError

JSON_LINES = (".jsonl", ".ndjson", ".json")
JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class RawDocument:
    """One document as it stands in its file."""

    path: str
    line: int  # of a file of JSON lines, from 1; 0: the document is the whole file
    content: bytes


class BadDocument(ConfigError):
    """A document that cannot be read as text; the message begins with file:line."""


def find_files(inputs: Sequence[str], glob: str, exclude: Sequence[str]) -> list[Path]:
    """The files that are named, and those in the folders that are named; in the order given, each folder's sorted.

    In a folder, `glob` picks files; `exclude` drops those where a pattern matches the path below the folder, or the
    name of the file or of any folder on that path. ConfigError where something does not exist or nothing is left.
    """
    files: list[Path] = []
    for root in map(Path, inputs):
        if root.is_dir():
            below = sorted(path.relative_to(root) for path in root.glob(glob) if path.is_file())
            files += [root / path for path in below if not _excluded(path, exclude)]
        elif root.is_file():
            files.append(root)
        else:
            raise ConfigError(f"The input {root} does not exist. Name files of text or JSON lines, or folders of them.")
    if not files:
        raise ConfigError(
            f"No input file is left: nothing below {', '.join(inputs) or '(no input)'} matches --glob {glob!r} "
            f"and none of --exclude {' '.join(exclude) or '(nothing)'}. Check the folder and the patterns."
        )
    return files


def _excluded(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns for name in (path.as_posix(), *path.parts))


def raw_documents(files: Sequence[Path]) -> Iterator[RawDocument]:
    """The documents of the files, in order, one in memory at a time. A byte order mark is no part of a document."""
    for path in files:
        try:
            with open(path, "rb") as file:
                if path.suffix.lower() not in JSON_LINES:
                    yield RawDocument(str(path), 0, file.read().removeprefix(codecs.BOM_UTF8))
                    continue
                for number, line in enumerate(file, start=1):  # of bytes: ends at \n alone, as JSON lines do
                    content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if content.strip():
                        yield RawDocument(str(path), number, content)
        except OSError as error:
            raise ConfigError(f"Cannot read the input {path}: {error.strerror}.") from None


def parse(document: RawDocument, json_key: str) -> str:
    """The text of a document. BadDocument, with file:line:reason, where it is not UTF-8, not JSON, or has no text."""
    try:
        text = document.content.decode()
        return _text_of_line(text, json_key) if document.line else text
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        reason = f"not JSON ({error.msg} at character {error.pos})"
    except RecursionError:
        reason = "JSON nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise bad_document(document, reason)


def bad_document(document: RawDocument, reason: str) -> BadDocument:
    """The error that names a document and what is wrong with it."""
    place = f"{document.path}:{document.line}" if document.line else document.path
    return BadDocument(f"{place}: {reason}")


def _text_of_line(line: str, json_key: str) -> str:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"{JSON_NAMES.get(type(record), 'a string')} instead of a JSON object")
    if json_key not in record:
        raise ValueError(f"no key {json_key!r} (keys: {', '.join(record) or 'none'})")
    text = record[json_key]
    if not isinstance(text, str):
        raise ValueError(f"{json_key!r} is {JSON_NAMES[type(text)]}, not a string")
    text.encode()  # an escape for half of a surrogate pair is JSON, but no text
    return text
