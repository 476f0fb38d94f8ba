"""tokenizer.py and vocabulary.py: text comes back unchanged, ids stay in range, mistakes are told."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron3d.config import ConfigError
from megatron3d.tokenizer import EOD_PIECE, Tokenizer, load_tokenizer
from megatron3d.vocabulary import SENTENCE, sentences, train_model

CODE = [
    "".join(
        f"def area_{number}(self, width, height={number}):\n\t'''Area.'''\n    return  width * height\n\n"
        for number in row
    )
    for row in (range(20), range(20, 40))
]
TEXTS = [
    "  two  spaces",
    "x\n\ty",
    "",
    " ",
    "\n\n\n",
    "\r\n",
    "emoji \N{GRINNING FACE} and \N{FAMILY}\N{ZERO WIDTH JOINER}",
    "ሰላም 你好",
    "e\N{COMBINING ACUTE ACCENT} \N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\N{BYTE ORDER MARK}",
    "\0 \x0b \x85 \u2028",
    "\N{LOWER ONE EIGHTH BLOCK}block\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE EIGHTH BLOCK} ",
    "\N{LOWER FIVE EIGHTHS BLOCK}",
    "<unk> <0x0A> <s> </s> " + EOD_PIECE,
    "1234567890",
    CODE[0],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 300 pieces trained on a little code."""
    path = tmp_path_factory.mktemp("model") / "code.model"
    path.write_bytes(train_model(lambda: CODE, 300))
    return path


@pytest.fixture(params=["byte", "pieces"])
def tokenizer(request: pytest.FixtureRequest, model: Path) -> Tokenizer:
    """Both kinds."""
    return load_tokenizer("byte" if request.param == "byte" else str(model))


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """DATA-09: spaces, tabs, line ends, emoji and unseen scripts come back; no unknown piece, no end of document."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert tokenizer.eod not in ids
    if tokenizer.vocab_size == 300:
        assert 0 not in ids  # the unknown piece


def test_random_text_round_trips(tokenizer: Tokenizer) -> None:
    draw = random.Random(5)
    alphabet = " \n\t_=()ab\r\0\N{LOWER ONE EIGHTH BLOCK}é漢\N{GRINNING FACE}\ufffd\u2585"
    for _ in range(200):
        text = "".join(draw.choices(alphabet, k=draw.randrange(40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_first_word_has_the_same_ids_as_later_ones(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    width = tokenizer.encode("width")
    assert tokenizer.encode("\nwidth") == tokenizer.encode("\n") + width


def test_sizes_and_the_end_of_a_document(tokenizer: Tokenizer, model: Path) -> None:
    assert (load_tokenizer("byte").vocab_size, load_tokenizer("byte").eod) == (257, 256)
    assert load_tokenizer(str(model)).vocab_size == 300
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod, *tokenizer.encode("b")]) == "ab"


def test_broken_ids_and_text(tokenizer: Tokenizer) -> None:
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(ConfigError, match=f"token id {id} .* {tokenizer.vocab_size} ids"):
            tokenizer.decode([id])
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("half a pair: \ud800")


def test_a_model_without_end_piece_is_refused_and_one_with_another_space_rule_is_kept(tmp_path: Path) -> None:
    def foreign(**settings: Any) -> str:
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CODE),
            model_writer=written,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
            **settings,
        )
        path = tmp_path / "foreign.model"
        path.write_bytes(written.getvalue())
        return str(path)

    with pytest.raises(ConfigError, match=r"foreign\.model has no end-of-sentence"):
        load_tokenizer(foreign(eos_id=-1))
    path = foreign()
    text = "a \N{LOWER ONE EIGHTH BLOCK} b"
    expected = sentencepiece.SentencePieceProcessor(model_file=path).encode(text)
    assert load_tokenizer(path).encode(text) == expected


def test_no_model_is_told(tmp_path: Path) -> None:
    for name, content in (("empty.model", b""), ("garbage.model", b"garbage" * 100)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} is not a SentencePiece model"):
            load_tokenizer(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"absent\.model: No such file"):
        load_tokenizer(str(tmp_path / "absent.model"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="byte"):
        load_tokenizer("")


def test_training_is_repeatable(model: Path) -> None:
    assert train_model(lambda: iter(CODE), 300) == model.read_bytes()


def test_the_largest_vocabulary_is_told_and_works() -> None:
    """DATA-11: 32,000 pieces from ten lines: the message gives the largest size, which then works, and one more not."""
    lines = CODE[0].splitlines()[:10]
    with pytest.raises(ConfigError, match=r"32000 is too large.*Use --vocab-size \d+ or less") as error:
        train_model(lambda: lines, 32_000)
    largest = int(str(error.value).split("--vocab-size ")[2].split()[0])
    assert sentencepiece.SentencePieceProcessor(model_proto=train_model(lambda: lines, largest)).vocab_size() == largest
    with pytest.raises(ConfigError, match=f"{largest + 1} is too large"):
        train_model(lambda: lines, largest + 1)


def test_a_vocabulary_for_bytes_alone_is_too_small() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 258 is too small"):
        train_model(lambda: CODE, 258)


def test_a_small_vocabulary_takes_any_number_of_characters() -> None:
    everything = ["".join(map(chr, (*range(0xD800), *range(0xE000, 0x11000)))), *CODE]
    size = 280
    assert sentencepiece.SentencePieceProcessor(model_proto=train_model(lambda: everything, size)).vocab_size() == size


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_no_text_is_told(documents: list[str]) -> None:
    with pytest.raises(ConfigError, match="no text"):
        train_model(lambda: documents, 300)


@pytest.mark.parametrize(
    "make",
    [
        lambda draw: "".join(draw.choices("abcdef", k=3 * SENTENCE)),  # a single word beyond SentencePiece's 16 bits
        lambda draw: "word \n" * SENTENCE,
        lambda draw: "\n" * (2 * SENTENCE + 1),
        lambda draw: "short",
    ],
)
def test_long_documents_are_cut_without_loss(make: Callable[[random.Random], str]) -> None:
    text = make(random.Random(1))
    parts = list(sentences(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= SENTENCE
    train_model(lambda: [text, *CODE], 300)


def test_tokenizers_load_without_torch() -> None:
    """The tools, which encode in many processes, do not pay for torch."""
    program = "import sys, megatron3d.encode, megatron3d.vocabulary; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)
