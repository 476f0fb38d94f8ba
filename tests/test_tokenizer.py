"""tokenizer.py, huggingface_tokenizer.py and vocabulary.py: text comes back unchanged, ids stay in range, mistakes are
told."""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron3d.config import ConfigError
from megatron3d.tokenizer import EOD_PIECE, SPACE_MARK, Tokenizer, load_tokenizer
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


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of 320 tokens of the shape of GPT-2's, with nothing beside it."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[EOD_PIECE], show_progress=False
    )
    model.train_from_iterator(CODE, trainer)
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of the shape of Llama 2's: words that begin with SPACE_MARK, bytes where there is no piece."""
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    parts = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special + bytes_, show_progress=False)
    model.train_from_iterator(CODE, trainer)
    definition = json.loads(model.to_str())
    definition["added_tokens"] = definition["added_tokens"][: len(special)]  # bytes are no names of their own
    path = tmp_path_factory.mktemp("llama_2") / "tokenizer.json"
    path.write_text(json.dumps(definition))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return path


@pytest.fixture(params=["byte", "pieces", "byte level"])
def tokenizer(request: pytest.FixtureRequest, model: Path, byte_level: Path) -> Tokenizer:
    """Each kind that gives every text back."""
    specs = {"byte": "byte", "pieces": str(model), "byte level": str(byte_level)}
    return load_tokenizer(specs[request.param])


def edited(path: Path, target: Path, edit: Callable[[dict[str, Any]], object]) -> str:
    """A tokenizer.json with a change, in a folder of its own."""
    definition = json.loads(path.read_text())
    edit(definition)
    target.write_text(json.dumps(definition))
    return str(target)


def added(name: str, id: int, *, special: bool = True) -> dict[str, Any]:
    """How a tokenizer.json writes a token outside its model."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": name, "special": special, **flags}


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


def test_sizes_and_the_end_of_a_document(tokenizer: Tokenizer, model: Path, byte_level: Path, llama_2: Path) -> None:
    assert (load_tokenizer("byte").vocab_size, load_tokenizer("byte").eod) == (257, 256)
    assert load_tokenizer(str(model)).vocab_size == 300
    assert (load_tokenizer(str(byte_level)).vocab_size, load_tokenizer(str(llama_2)).vocab_size) == (320, 340)
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


@pytest.mark.parametrize("shape", ["byte_level", "llama_2"])
def test_tokens_of_a_tokenizer_json_are_those_of_transformers(shape: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(shape)
    ours, theirs = load_tokenizer(str(path)), PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in (text for text in TEXTS if EOD_PIECE not in text):  # in which transformers would see special tokens
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False)


def test_a_tokenizer_json_with_words_that_begin_with_a_mark(llama_2: Path) -> None:
    """Text comes back but for the mark, which is a space to it; names of its special tokens are text."""
    tokenizer = load_tokenizer(str(llama_2))
    names = json.loads(llama_2.read_text())["model"]["vocab"]
    assert tokenizer.eod == names["</s>"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace(SPACE_MARK, " ")
        assert not {names["<unk>"], names["<s>"], names["</s>"]} & set(ids)
    assert tokenizer.decode([names["<s>"], *tokenizer.encode("a"), tokenizer.eod]) == "<s> a"


def test_the_end_of_a_document_is_the_eos_token_beside_a_tokenizer_json(byte_level: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ends = [added("<|im_end|>", 320), added("<end>", 321, special=False)]
    edited(byte_level, path, lambda definition: definition["added_tokens"].extend(ends))
    said, later = tmp_path / "tokenizer_config.json", tmp_path / "special_tokens_map.json"
    for file, token, id in (
        (later, "<|im_end|>", 320),
        (said, None, 320),  # the other file has one
        (said, {"content": "<end>", "special": True}, 321),
        (said, EOD_PIECE, 0),
    ):
        file.write_text(json.dumps({"eos_token": token, "model_max_length": 8}))
        tokenizer = load_tokenizer(str(path))
        assert (tokenizer.eod, tokenizer.vocab_size) == (id, 322)
        text = f"a {EOD_PIECE} <|im_end|> <end> b"
        assert tokenizer.eod not in tokenizer.encode(text)
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text
    said.write_text('{"eos_token": "gone"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json has no token 'gone', which files beside it call eos_token"):
        load_tokenizer(str(path))
    for damaged in ("{", "[]"):
        said.write_text(damaged)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json (is not JSON|must hold a JSON object)"):
            load_tokenizer(str(path))


def test_a_tokenizer_json_without_an_end_is_told(llama_2: Path, tmp_path: Path) -> None:
    path = edited(llama_2, tmp_path / "tokenizer.json", lambda definition: None)
    with pytest.raises(
        ConfigError, match=r"no token '<\|endoftext\|>'.*tokenizer_config\.json beside it: {\"eos_token"
    ):
        load_tokenizer(path)


def test_settings_of_a_tokenizer_json_neither_cut_nor_fill_up_nor_vary_a_text(byte_level: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(byte_level))
    model.enable_truncation(4)
    model.enable_padding(length=9000)
    model.post_processor = processors.TemplateProcessing(
        single=f"{EOD_PIECE} $A {EOD_PIECE}", special_tokens=[(EOD_PIECE, 0)]
    )
    model.model.dropout = 0.5
    model.save(str(tmp_path / "tokenizer.json"))
    plain, tokenizer = load_tokenizer(str(byte_level)), load_tokenizer(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text)


def test_ids_that_no_token_has(byte_level: Path, tmp_path: Path) -> None:
    """The largest id counts, not the number of tokens."""
    path = edited(byte_level, tmp_path / "gap.json", lambda definition: definition["model"]["vocab"].update(gap=325))
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == 326
    ids = [320, *tokenizer.encode("width"), tokenizer.eod, 321, 325, 324]
    assert tokenizer.decode(ids) == "\ufffdwidth\ufffdgap\ufffd"
    with pytest.raises(ConfigError, match=r"token id 326 .* 326 ids"):
        tokenizer.decode([326])


def test_a_text_that_would_hold_its_own_end_is_refused(tmp_path: Path) -> None:
    """Where a model of whole words has the end among its words, and where the end stands for unknown characters."""
    path = tmp_path / "words.json"
    for unknown in ("?", EOD_PIECE):
        model = tokenizers.Tokenizer(models.WordLevel({EOD_PIECE: 0, "a": 1, "?": 2}, unk_token=unknown))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model.save(str(path))
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.encode("a a") == [1, 1]
        with pytest.raises(ConfigError, match=r"words\.json makes the token that ends a document of '<\|endoftext\|>'"):
            tokenizer.encode(f"a {EOD_PIECE} a")
    with pytest.raises(ConfigError, match=r"words\.json makes .* of 'new'"):
        tokenizer.encode("a new a")


def test_characters_do_not_vanish(byte_level: Path, llama_2: Path, tmp_path: Path) -> None:
    """The library leaves out what pairs of bytes have no token for, without a word."""

    def no_tab(definition: dict[str, Any]) -> None:
        definition["model"]["vocab"].pop("\u0109")  # how a tab is written there
        definition["model"]["merges"] = []

    def no_unknown(definition: dict[str, Any]) -> None:
        definition["model"].update(unk_token=None, byte_fallback=False)

    def no_byte_that_utf8_has_not(definition: dict[str, Any]) -> None:
        for byte in (0xC0, 0xC1, *range(0xF5, 0x100)):  # each is its own letter there
            definition["model"]["vocab"].pop(chr(byte))

    whole = load_tokenizer(edited(byte_level, tmp_path / "whole.json", no_byte_that_utf8_has_not))
    everywhere = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 61), *range(0xE000, 0x110000, 61))))
    assert whole.decode(whole.encode(everywhere)) == everywhere

    for path, edit in ((byte_level, no_tab), (llama_2, no_unknown)):
        with pytest.raises(
            ConfigError, match=r"lost\.json has \d+ tokens, but neither one for each byte nor an unknown"
        ):
            load_tokenizer(edited(path, tmp_path / "lost.json", edit))


def test_a_text_that_the_library_cannot_encode_is_told(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    tokenizers.Tokenizer(models.WordLevel({EOD_PIECE: 0, "a": 1}, unk_token="?")).save(str(path))
    with pytest.raises(ConfigError, match=r"words\.json cannot encode 'new'"):
        load_tokenizer(str(path)).encode("new")


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda definition: definition.pop("model"), "no tokenizer of Hugging Face's: it has no model"),
        (
            lambda definition: definition["model"].update(vocab=[]),
            "no tokenizer of Hugging Face's: .*Give a SentencePiece",
        ),
        (lambda definition: definition["model"].update(vocab={}, merges=[]), "has 1 tokens, but neither"),
        (lambda definition: definition["added_tokens"].append(added("new", 7)), "'new' cannot have the id 7"),
        (lambda definition: definition["model"]["vocab"].update(new=7), "two tokens have one id"),
        (
            lambda definition: definition.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "no tokenizer of Hugging Face's: .*precompiled_charsmap",  # where the library panics
        ),
    ],
)
def test_a_damaged_tokenizer_json_is_told(
    byte_level: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer\.json .*{told}"):
        load_tokenizer(edited(byte_level, tmp_path / "tokenizer.json", edit))


def test_no_tokenizer_json_is_told(byte_level: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.json"
    for content, told in (
        (b"", "is not JSON"),
        (b"\xff{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"3", "int"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"some\.json .*{told}"):
            load_tokenizer(str(path))
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read: No such file"):
        load_tokenizer(str(tmp_path / "absent.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"package tokenizers, which is not installed.*extra `hf`"):
        load_tokenizer(str(byte_level))


def test_other_processes_get_the_same_tokens(tokenizer: Tokenizer) -> None:
    """A copy of one that has been used, in processes that are copies of this one."""
    expected = [tokenizer.encode(text) for text in TEXTS]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(tokenizer.encode, TEXTS, chunksize=1).get(timeout=400) == expected


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
    """The tools, which encode in many processes, do not pay for torch, nor need packages of other tokenizers."""
    loaded = "bool({'torch', 'tokenizers'} & set(sys.modules))"
    program = f"import sys, megatron3d.encode, megatron3d.vocabulary; sys.exit({loaded})"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)
