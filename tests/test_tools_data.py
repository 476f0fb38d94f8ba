"""The way from text to token files: corpus.py, encode.py and the two tools, on what users' files look like."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron3d.config import ConfigError
from megatron3d.corpus import BadDocument, RawDocument, find_files, parse, raw_documents
from megatron3d.encode import Encoded, Recipe, batched, encode_all, encode_batch
from megatron3d.indexed import IndexedDataset, IndexedWriter, token_dtype
from tests.data import idx_tool

ROOT = Path(__file__).parent.parent
preprocess = importlib.import_module("tools.preprocess_data")
train = importlib.import_module("tools.train_tokenizer")

BYTES = Recipe(tokenizer="byte", json_key="text", append_eod=True, skip_bad=False)
EOD = 256


def lines(path: Path, *texts: str) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def encoded(path: Path, recipe: Recipe = BYTES) -> Encoded:
    """All documents of a file, in this process."""
    return encode_batch(list(raw_documents([path])), recipe)


def run(tool: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """A tool as a user starts it."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), *map(str, argv)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=400,
        check=False,
    )


def test_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "note.txt", "test/x.py", "sub/test_y.py", "sub/deep/tests/z.py", "sub/deep/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def found(*exclude: str, glob: str = "**/*.py") -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path)], glob, exclude)]

    assert found() == ["a.py", "b.py", "sub/deep/tests/z.py", "sub/deep/z.py", "sub/test_y.py", "test/x.py"]
    assert found("test", "tests") == ["a.py", "b.py", "sub/deep/z.py", "sub/test_y.py"]
    assert found("test*", "sub/deep/*") == ["a.py", "b.py"]
    assert found(glob="*.txt") == ["note.txt"]
    named = [str(tmp_path / "note.txt"), str(tmp_path / "test"), str(tmp_path / "a.py")]
    assert [path.name for path in find_files(named, "*.py", ["note.txt"])] == ["note.txt", "x.py", "a.py"]
    with pytest.raises(ConfigError, match="absent does not exist"):
        find_files([str(tmp_path / "absent")], "*", [])
    with pytest.raises(ConfigError, match=r"--glob '\*\.md'.*--exclude x y"):
        find_files([str(tmp_path)], "*.md", ["x", "y"])


def test_a_mark_and_windows_line_ends_change_no_token(tmp_path: Path) -> None:
    """DATA-04: a byte order mark and CRLF in JSON lines are accepted, the tokens equal those of the clean file."""
    clean = lines(tmp_path / "clean.jsonl", "hi", "there")
    content = clean.read_bytes()
    variants = {
        "mark": b"\xef\xbb\xbf" + content,
        "crlf": content.replace(b"\n", b"\r\n"),
        "both": b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"),
        "open": content.rstrip(b"\n"),
    }
    assert encoded(clean).ids.tolist() == [*b"hi", EOD, *b"there", EOD]
    for name, variant in variants.items():
        (tmp_path / f"{name}.jsonl").write_bytes(variant)
        assert encoded(tmp_path / f"{name}.jsonl").ids.tolist() == encoded(clean).ids.tolist()
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfhi\r\n")
    assert encoded(tmp_path / "text.txt").ids.tolist() == [*b"hi\r\n", EOD]


BROKEN = {
    b'{"text": "cut': "not JSON",
    b'{"body": "x", "id": 3}': "no key 'text' (keys: body, id)",
    b"{}": "no key 'text' (keys: none)",
    b'{"text": null}': "'text' is null, not a string",
    b'{"text": 3}': "'text' is a number, not a string",
    b'{"text": ["a"]}': "'text' is a list, not a string",
    b'["text"]': "a list instead of a JSON object",
    b'"text"': "a string instead of a JSON object",
    b'{"text": "\xff"}': "not UTF-8 text (invalid start byte at byte 10)",
    b'{"text": "\\ud800"}': "surrogates not allowed",
    b"[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("workers", [1, 4])
def test_broken_records_are_named_or_counted(workers: int, tmp_path: Path) -> None:
    """DATA-06: each kind of broken record among good ones is refused as file:line:reason, or skipped and counted."""
    path = tmp_path / "mixed.jsonl"
    good = [json.dumps({"text": f"good {number}"}).encode() for number in range(len(BROKEN))]
    path.write_bytes(b"\n".join(line for pair in zip(good, BROKEN, strict=True) for line in pair) + b"\n")
    for number, document in enumerate(raw_documents([path]), start=1):
        if number % 2 == 0:
            with pytest.raises(BadDocument) as error:
                parse(document, "text")
            assert str(error.value).startswith(f"{path}:{number}: ")
            assert list(BROKEN.values())[number // 2 - 1] in str(error.value)
    argv = ["--input", path, "--tokenizer", "byte", "--output", tmp_path / "out", "--workers", workers]
    refused = run("preprocess_data.py", *argv)
    assert refused.returncode == 2
    assert f"error: {path}:2: not JSON" in refused.stderr and "Traceback" not in refused.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mixed.jsonl"]
    skipped = run("preprocess_data.py", *argv, "--skip-bad", "--json")
    assert skipped.returncode == 0
    assert json.loads(skipped.stdout)["bad_documents"] == len(BROKEN)
    assert f"skipped {path}:{2 * len(BROKEN)}: " in skipped.stderr
    expected = [[[*f"good {number}".encode(), EOD]] for number in range(len(BROKEN))]
    assert idx_tool.read(tmp_path / "out") == (8, expected)


def test_blank_lines_are_neither_documents_nor_mistakes(tmp_path: Path) -> None:
    """DATA-06: blank lines are ignored, not counted as bad or empty; the lines after them keep their numbers."""
    path = tmp_path / "blank.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"text": "a"}\n\n \t\r\n{"text": "b"}\n{"text": 3}\n\n')
    result = encoded(path, replace(BYTES, skip_bad=True))
    assert result.ids.tolist() == [*b"a", EOD, *b"b", EOD]
    assert (result.num_empty, len(result.bad)) == (0, 1) and result.bad[0].startswith(f"{path}:6: ")


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    """DATA-01: a document of nothing but white space is skipped and counted, wherever it stands."""
    result = encoded(lines(tmp_path / "some.jsonl", "", "a", " \n\t", "b", ""))
    assert [ids.tolist() for ids in result.documents()] == [[*b"a", EOD], [*b"b", EOD]]
    assert (result.num_empty, result.bad, result.num_bytes) == (3, [], (tmp_path / "some.jsonl").stat().st_size)


@pytest.mark.parametrize("content", ["", '{"text": ""}\n{"text": " "}\n'])
def test_input_without_text_is_refused(content: str, tmp_path: Path) -> None:
    """DATA-01: all records empty, or an empty file: refused, and nothing is written."""
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no text"):
        preprocess.main(["--input", str(path), "--tokenizer", "byte", "--output", str(tmp_path / "out")])
    assert [file.name for file in tmp_path.iterdir()] == ["empty.jsonl"]


@pytest.mark.parametrize("append_eod", [True, False])
def test_lengths_count_the_end_of_a_document(append_eod: bool, tmp_path: Path) -> None:
    """DATA-02: each document ends with EOD exactly when asked, and the lengths add up to the .bin file."""
    path = lines(tmp_path / "three.jsonl", "one", "two and more", "3")
    flag = "--append-eod" if append_eod else "--no-append-eod"
    argv = ["--input", str(path), "--tokenizer", "byte", "--output", str(tmp_path / "new" / "out"), "--workers", "1"]
    preprocess.main([*argv, flag])
    end = [EOD] if append_eod else []
    expected = [[[*text, *end]] for text in (b"one", b"two and more", b"3")]
    assert idx_tool.read(tmp_path / "new" / "out") == (8, expected)
    indexed = IndexedDataset(str(tmp_path / "new" / "out"))
    assert 2 * int(indexed.document_sizes.sum()) == (tmp_path / "new" / "out.bin").stat().st_size


def thousand(folder: Path) -> list[Path]:
    """1,000 documents of uneven sizes: 900 lines and 100 files."""
    draw = np.random.default_rng(0)
    texts = [f"document {number} " * int(draw.integers(1, 300)) for number in range(1000)]
    for number, text in enumerate(texts[900:]):
        (folder / f"{number:03}.txt").write_text(text)
    return [lines(folder / "docs.jsonl", *texts[:900]), *sorted(folder.glob("*.txt"))]


def test_the_result_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    """DATA-13: byte-identical output for 1, 2 and 4 workers, with batches that finish out of order."""
    files = thousand(tmp_path)
    batches = list(batched(raw_documents(files)))
    assert len(batches) >= 4
    written = []
    for workers in (1, 2, 4):
        prefix = tmp_path / f"out{workers}"
        with IndexedWriter(str(prefix), token_dtype(257)) as writer:
            for batch in encode_all(batches, BYTES, workers=workers):
                for ids in batch.documents():
                    writer.add_document(ids)
        written.append([Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert written[0] == written[1] == written[2]
    _, documents = idx_tool.read(tmp_path / "out1")
    texts = [parse(document, "text") for document in raw_documents(files)]
    assert [bytes(document[0][:-1]).decode() for document in documents] == texts


def die(batch: list[RawDocument], recipe: Recipe) -> Encoded:
    """An encoder that the system kills at one document."""
    if any(document.line == 700 for document in batch):
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_batch(batch, recipe)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dead_worker_is_an_error_and_leaves_nothing(workers: int, tmp_path: Path) -> None:
    """DATA-13: a worker that dies ends the work with an error and no files, instead of an incomplete result."""
    batches = batched(raw_documents(thousand(tmp_path)))

    def write() -> None:
        with IndexedWriter(str(tmp_path / "out"), token_dtype(257)) as writer:
            for batch in encode_all(batches, BYTES, workers=workers, encoder=die):
                for ids in batch.documents():
                    writer.add_document(ids)

    with pytest.raises(ConfigError, match=r"worker process died .*docs\.jsonl"):
        write()
    assert not list(tmp_path.glob("out*"))


def test_from_text_to_tokens_with_both_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of code -> a tokenizer -> token files -> the same text."""
    folder = ROOT / "megatron3d"
    argv = ["--input", str(folder), "--glob", "*.py", "--exclude", "__init__.py"]
    model = tmp_path / "new" / "code.model"
    train.main([*argv, "--vocab-size", "400", "--output", str(model), "--json"])
    summary = json.loads(capsys.readouterr().out)
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    assert summary["files"] == len(files) and summary["vocab_size"] == 400
    assert summary["bytes"] == sum(path.stat().st_size for path in files)
    assert summary["bytes_per_token"] > 1.5
    preprocess.main([*argv, "--tokenizer", str(model), "--output", str(tmp_path / "out"), "--json", "--workers", "1"])
    counts = json.loads(capsys.readouterr().out)
    assert (counts["documents"], counts["dtype"], counts["vocab_size"]) == (len(files), "uint16", 400)
    tokenizer = train.load_tokenizer(str(model))
    indexed = IndexedDataset(str(tmp_path / "out"))
    assert counts["tokens"] == len(indexed.tokens)
    for index, path in enumerate(files):
        ids = indexed.document(index).tolist()
        assert ids[-1] == tokenizer.eod
        assert tokenizer.decode(ids) == path.read_text()


def test_a_failed_training_leaves_no_file(tmp_path: Path) -> None:
    """DATA-11: too many pieces for ten lines: exit 2, the largest size in the message, no model."""
    path = lines(tmp_path / "ten.jsonl", *(f"line {number}" for number in range(10)))
    failed = run("train_tokenizer.py", "--input", path, "--vocab-size", 32000, "--output", tmp_path / "out.model")
    assert failed.returncode == 2
    assert "error: --vocab-size 32000 is too large for this text" in failed.stderr and "or less" in failed.stderr
    assert "Traceback" not in failed.stderr and not failed.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["ten.jsonl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda argv: [*argv, "--workers", "-1"], "--workers -1"),
        (lambda argv: [*argv, "--tokenizer", "absent.model"], "absent.model"),
        (lambda argv: [*argv, "--input", "absent.txt"], "absent.txt does not exist"),
        (lambda argv: [*argv, "--json-keys", "text"], "--json-key"),
        (lambda argv: argv[2:], "--input"),
    ],
)
def test_mistakes_in_flags_are_told(change: Callable[[list[str]], list[str]], message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "one.jsonl", "text")
    argv = ["--input", str(path), "--tokenizer", "byte", "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=message):
        preprocess.main(change(argv))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("new/", "is a folder.*new/corpus"),
        (".", "is a folder"),
        ("", "is a folder"),
        ("corpus.bin", "in common: corpus and not corpus.bin"),
        ("corpus.idx", "in common: corpus and not corpus.idx"),
        ("one.jsonl/corpus", r"Cannot write one.jsonl/corpus.bin \("),
    ],
)
def test_a_prefix_that_cannot_be_written(
    output: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "one.jsonl", "text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        preprocess.main(["--input", "one.jsonl", "--tokenizer", "byte", "--output", output])
    assert [file.name for file in tmp_path.iterdir()] == ["one.jsonl"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("new/", "'new/' is a folder"),
        ("old", "'old' is a folder"),
        ("one.jsonl/some.model", r"Cannot write one.jsonl/some.model \("),
    ],
)
def test_a_model_that_cannot_be_written_is_not_trained(
    output: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "one.jsonl", "text")
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train_model", lambda *_: pytest.fail("was trained"))
    with pytest.raises(ConfigError, match=message):
        train.main(["--input", "one.jsonl", "--output", output])
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["old", "one.jsonl"]


@pytest.mark.parametrize("tool", ["train_tokenizer.py", "preprocess_data.py"])
def test_help_needs_no_torch(tool: str) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{tool!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'tools' / tool)!r}, run_name='__main__')\n"
        "finally:\n"
        "    assert not {'torch', 'sentencepiece'} & set(sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    for word in ("--input", "--output", "--glob", "--exclude", "--json-key", "JSON lines"):
        assert word in shown.stdout
