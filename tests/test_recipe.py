"""From Hugging Face to one's own data and back, as docs/checkpoints.md tells it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron3d.archive import NativeSource
from megatron3d.config import Config, DataConfig
from megatron3d.convert import write_native
from megatron3d.resume import kept_tokenizer, saved_config
from megatron3d.shelf import find
from megatron3d.tokenizer import load_tokenizer
from tests import toy
from tests.agent import Job
from tests.lone import lone_trainer
from tests.test_convert import MIXED, in_memory
from tools import convert_checkpoint, generate

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 290  # of the model's own tokenizer
END = "<|end|>"
LINES = [f"{i}: {'one two three four five six seven ' * 6}" for i in range(200)]
TRAIN = [
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "4",
    "--train-steps",
    "20",
    "--lr",
    "1e-2",
    "--lr-schedule",
    "constant",
]


def tool(name: str, *words: object) -> str:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def save_tokenizer(folder: Path) -> None:
    """A tokenizer as a model of Hugging Face's has it, whose documents end with END."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    model.train_from_iterator(LINES, trainer)
    assert model.get_vocab_size() == VOCAB
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END).save_pretrained(folder)


@pytest.mark.slow
def test_import_continue_export_generate(tmp_path: Path) -> None:
    """A Llama of another's, two stages by two tensor-parallel ranks on one's own lines, and transformers reads it."""
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=64,
            eos_token_id=0,
        )
    )
    theirs.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    tokenizer = tmp_path / "theirs" / "tokenizer.json"
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in LINES))

    tool("convert_checkpoint", "--load", tmp_path / "theirs", "--save", tmp_path / "start", "--seq-length", 32)
    corpus = ["--input", tmp_path / "own.jsonl", "--output", tmp_path / "corpus"]
    summary = json.loads(tool("preprocess_data", *corpus, "--tokenizer", tokenizer, "--workers", 2, "--json"))
    assert (summary["vocab_size"], summary["documents"]) == (VOCAB, len(LINES))
    places = ["--data-path", tmp_path / "corpus", "--save", tmp_path / "run", "--log-dir", tmp_path / "log"]
    places += ["--tokenizer", tokenizer]
    begin = ["--config", tmp_path / "start" / "model.toml", "--load", tmp_path / "start", "--load-weights-only"]
    words = map(str, [*begin, *places, *TRAIN, "--tp", 2, "--pp", 2])
    code, text = Job(tmp_path / "out", "pretrain_gpt.py", *words).end()
    assert code == 0, text
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 2
    tool("convert_checkpoint", "--load", tmp_path / "run", "--save", tmp_path / "out.hf", "--to", "hf")

    after, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out.hf", output_loading_info=True)
    assert not any(told.values()), told
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out.hf")
    prompt = "7: one two three"
    sample = ["--load", tmp_path / "run", "--prompt", prompt, "--max-new-tokens", 12, "--temperature", 0]
    sampled = json.loads(tool("generate", *sample, "--json"))
    asked = words(END + prompt, add_special_tokens=False, return_tensors="pt")
    found = after.generate(**asked, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    new = found[0, asked["input_ids"].shape[1] :].tolist()
    assert (new, words.decode(new)) == (sampled["ids"], sampled["text"])
    assert sampled["text"].startswith(" four five six seven one")


def test_an_export_ends_where_the_run_s_documents_ended(tmp_path: Path) -> None:
    """Or generation would never stop; what is said goes before what follows."""
    config = toy.config(replace(toy.LLAMA, num_layers=1, vocab_size=257), global_batch_size=1)
    trainer = lone_trainer(replace(config, data=replace(config.data, tokenizer="byte")))
    trainer.save(str(tmp_path / "run"))
    for words, ids in (((), (None, 256)), (("--bos-token-id", 3, "--eos-token-id", 5), (3, 5))):
        target = tmp_path / f"hf{len(words)}"
        given = ["--load", tmp_path / "run", "--save", target, "--to", "hf", *words]
        convert_checkpoint.main([str(word) for word in given])
        told = transformers.AutoConfig.from_pretrained(target)
        assert (told.bos_token_id, told.eos_token_id) == ids


def test_a_tokenizer_json_goes_from_a_run_to_its_export(tmp_path: Path) -> None:
    """With the files beside it, under the names that transformers looks for; the run's own may be gone."""
    save_tokenizer(tmp_path / "own")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    (tmp_path / "own" / "tokenizer.json").rename(tmp_path / "own" / "mine.json")
    (tmp_path / "own" / "README.md").write_text("of no use to it")
    config = toy.config(replace(toy.LLAMA, num_layers=1, vocab_size=VOCAB), global_batch_size=1)
    config = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "own" / "mine.json")))
    lone_trainer(config).save(str(tmp_path / "run"))
    found = find(tmp_path / "run")
    assert kept.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert {name: (found.path / "companions" / name).read_bytes() for name in found.index.companions} == kept

    ids = load_tokenizer(str(tmp_path / "own" / "mine.json")).encode(LINES[7])
    shutil.rmtree(tmp_path / "own")
    run = (saved_config(found.index), "run", found.path / "companions")
    assert generate.tokenizer_of_run(*run).encode(LINES[7]) == ids
    convert_checkpoint.main(["--load", str(tmp_path / "run"), "--save", str(tmp_path / "hf"), "--to", "hf"])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert words.eos_token_id == transformers.AutoConfig.from_pretrained(tmp_path / "hf").eos_token_id == 0
    assert words(LINES[7])["input_ids"] == ids


def test_a_run_s_own_kind_of_tokenizer_is_taken_where_a_model_came_with_both(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).touch()
    for named, taken in (("", "tokenizer.model"), ("a.model", "tokenizer.model"), ("a.json", "tokenizer.json")):
        assert kept_tokenizer(Config(data=DataConfig(tokenizer=named)), tmp_path) == str(tmp_path / taken)
    assert kept_tokenizer(Config(data=DataConfig(tokenizer="byte")), tmp_path) == "byte"
    (tmp_path / "tokenizer.model").unlink()
    assert kept_tokenizer(Config(), tmp_path) == str(tmp_path / "tokenizer.json")
    assert kept_tokenizer(Config(data=DataConfig(tokenizer="a.model")), tmp_path / "nowhere") == "a.model"


def test_the_reader_in_the_docs_reads(tmp_path: Path) -> None:
    """With safetensors and torch alone, weights of half precision too."""

    text = (ROOT / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, object] = {}
    exec(code, names)  # our own words
    path = write_native(in_memory(MIXED, dtype="bf16"), tmp_path, tp=2, pp=2)
    source = NativeSource(path, find(tmp_path).index)
    for name in ("embedding.word.weight", "layers.3.mlp.down.weight", "head.norm.weight"):
        read = names["read"]
        for kind in MIXED:
            assert callable(read) and torch.equal(read(path, kind, name), source.read(kind, name))
