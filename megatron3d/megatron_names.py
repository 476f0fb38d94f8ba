"""Megatron-LM's public option names, as other spellings of ours.

The one idea: a table from one spelling to another; names are taken over, defaults are ours. cli.py applies it to the
words of a command line before anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron3d.config import ConfigError

ALIASES = {
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--sequence-parallel": "--sp",
    "--use-distributed-optimizer": "--zero 1",
    "--overlap-grad-reduce": "--overlap",
    "--overlap-param-gather": "--overlap",
    "--ddp-bucket-size": "--bucket-size",
    "--recompute-granularity": "--recompute",
    "--kv-channels": "--head-dim",
    "--max-position-embeddings": "--max-position",
    "--position-embedding-type": "--position-embedding",
    "--use-rotary-position-embeddings": "--position-embedding rope",
    "--rotary-base": "--rope-theta",
    "--swiglu": "--activation swiglu",
    "--qk-layernorm": "--qk-norm",
    "--disable-bias-linear": "--bias none",
    "--add-qkv-bias": "--bias qkv",
    "--untie-embeddings-and-output-weights": "--no-tied-embeddings",
    "--init-method-std": "--init-std",
    "--hidden-dropout": "--dropout",
    "--train-iters": "--train-steps",
    "--lr-decay-style": "--lr-schedule",
    "--lr-warmup-iters": "--warmup-steps",
    "--lr-wsd-decay-iters": "--decay-steps",
    "--adam-beta1": "--beta1",
    "--adam-beta2": "--beta2",
    "--adam-eps": "--eps",
    "--eval-iters": "--eval-steps",
    "--tokenizer-model": "--tokenizer",
    "--override-opt-param-scheduler": "--override-schedule",
    "--finetune": "--load-weights-only",
    "--bf16": "--dtype bf16",
    "--deterministic-mode": "--deterministic",
}
"""Megatron-LM's option -> ours, with its value where theirs has none."""

IMPLIED = {
    "--attention-dropout": "0 only: attention has no dropout",
    "--group-query-attention": "with --num-query-groups, which says it",
}
"""Megatron-LM's options that say what holds anyway -> when they do."""

VALUES = {
    "--position-embedding": {"learned_absolute": "learned"},
    "--normalization": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"},
    "--lr-schedule": {"WSD": "wsd"},
    "--optimizer": {"adam": "adamw"},  # Megatron-LM's adam decouples its weight decay
}
"""Our option -> Megatron-LM's value -> ours."""


def translate(words: Sequence[str]) -> list[str]:
    """The words of a command line in our spelling; `--a_b=c` becomes `--a-b c`, unknown options stay as they are.

    ConfigError for an option of IMPLIED that asks for something else.
    """
    if "--add-qkv-bias" in words:  # Megatron-LM gives both to say "on query, key and value only"
        words = [word for word in words if word != "--disable-bias-linear"]
    translated: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            translated += ALIASES.get(name, name).split() + [value] * bool(equals)
        else:
            translated.append(word)
    translated = _without_implied(translated)
    options = ["", *translated]
    return [VALUES.get(option, {}).get(word, word) for option, word in zip(options, translated, strict=False)]


def _without_implied(words: Sequence[str]) -> list[str]:
    """The words without the options of IMPLIED and their values."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--attention-dropout":
            _check_zero(next(rest, ""))
        elif word != "--group-query-attention":
            kept.append(word)
        elif "--num-query-groups" not in words:
            raise ConfigError(
                "--group-query-attention does not say how many key/value heads there are. Give --num-query-groups N, "
                "which needs no other option (Megatron-LM would take 1)."
            )
    return kept


def _check_zero(dropout: str) -> None:
    try:
        if float(dropout) == 0:
            return
    except ValueError:
        pass
    raise ConfigError(
        f"--attention-dropout {dropout}: only 0 is possible, since the mask inside a fused attention would depend on "
        "the layout. Give 0 or leave it out; --dropout acts on the embedding and on both residual branches."
    )
