"""This project beside transformers' Llama on one card: `python -m benchmarks.one_card`, one process. See --help.

The one idea: as in peers.py contenders take turns, and ratios are taken within a round; each turn begins with the same
weights and reads the same samples, so that its losses can be compared too. The contenders are in one_card_turns.py.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import peers, table
from benchmarks.one_card_turns import Start, described, initial_weights, ours, theirs, turn
from benchmarks.problem import WARMUP
from benchmarks.rows import OURS
from megatron3d.cli import parse_tool
from megatron3d.config import (
    BatchConfig,
    Config,
    ConfigError,
    Device,
    DType,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recompute,
    RunConfig,
)
from megatron3d.cost import flops_per_token
from megatron3d.launch import Launch, user_errors
from megatron3d.mesh import pick_device
from megatron3d.metrics import peak_tflops, rates
from megatron3d.params import num_parameters, param_table
from megatron3d.validate import resolve
from megatron3d.words import flag

MARKS = ("<!-- written by benchmarks/one_card.py: begin -->", "<!-- written by benchmarks/one_card.py: end -->")
THEIRS = "transformers"
LOSS_GAP = {"fp32": 2e-5, "bf16": 2e-2}
"""By the dtype of a run: how far rounding may take two losses of one step apart."""
LISTED = 10  # kernels
LONGEST = 90  # letters of a kernel's name; some have hundreds


class Scale(NamedTuple):
    """How much is compared."""

    model: ModelConfig
    dtype: DType
    micro_batch_size: int
    global_batch_size: int
    rounds: int
    steps: int


CARD = Scale(
    ModelConfig(
        num_layers=24,
        hidden_size=2048,
        ffn_hidden_size=5504,
        num_attention_heads=16,
        vocab_size=32_000,
        seq_length=4096,
    ),
    dtype="bf16",
    micro_batch_size=4,
    global_batch_size=16,
    rounds=3,
    steps=13,
)
TINY = Scale(
    ModelConfig(num_layers=3, ffn_hidden_size=176, vocab_size=512, seq_length=128),
    dtype="fp32",
    micro_batch_size=1,
    global_batch_size=2,
    rounds=2,
    steps=3,
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the comparison."""

    tiny: bool = False
    """Three small layers in fp32, two rounds of three steps: whether all of this runs, on any machine."""
    rounds: int = 0
    """How often each contender runs; 0: 3, or 2 with --tiny."""
    steps: int = 0
    """Steps of a run; the first 3 are not timed, or all but the last one. 0: 13, or 3 with --tiny."""
    micro_batch_size: int = 0
    """Samples of a forward pass; 0: 4, or 1 with --tiny."""
    global_batch_size: int = 0
    """Samples of a step; 0: 16, or 2 with --tiny."""
    recompute: Recompute = "none"
    """Activations that our trainer recomputes; transformers' model keeps all of them."""
    compile: bool = True
    """transformers' model goes through torch.compile."""
    device: Device = "auto"
    """auto: a GPU where there is one, else the CPU, which takes --tiny only."""
    peak_tflops: float = 0.0
    """Dense peak of the device in TFLOP/s, for MFU; 0: looked up by its name, unknown on CPUs."""
    json: str = ""
    """File for all that was measured."""
    write: str = ""
    """Markdown document whose table is replaced."""


# Measuring


def main(argv: Sequence[str]) -> int:
    """Measures and prints the table; 1 if losses are further apart than rounding takes them."""
    flags = parse_tool(Flags, argv, description="Speed, memory and losses of this project and transformers' Llama.")
    scale = chosen(flags)
    config, device = settings(scale, flags.recompute), pick_device(flags.device, Launch())
    if device.type == "cpu" and not flags.tiny:
        raise ConfigError(
            f"A CPU would need hours for each step of {num_parameters(param_table(config.model)):,} parameters. Run "
            "this where there is a CUDA device, or with --tiny to see that it runs."
        )
    check_for_transformers()
    document = peers.place_for_table(flags.write, MARKS)
    results = compare(flags, scale, config, device)
    rendered = render(results)
    print(rendered)
    if document:
        Path(flags.write).write_text(table.insert(document, rendered, MARKS))
    return int(largest_gap(results) > LOSS_GAP[scale.dtype])


def chosen(flags: Flags) -> Scale:
    """The scale, with what the flags say otherwise."""
    names = ("rounds", "steps", "micro_batch_size", "global_batch_size")
    said = {name: number for name in names if (number := getattr(flags, name))}
    if said and min(said.values()) < 0:
        given = " ".join(f"{flag(name)} {number}" for name, number in said.items())
        raise ConfigError(f"{given}: each must be at least 1, or 0 for the number that --help names.")
    return (TINY if flags.tiny else CARD)._replace(**said)


def settings(scale: Scale, recompute: Recompute) -> Config:
    """What both contenders have to do, in our words."""
    config = Config(
        model=scale.model,
        parallel=ParallelConfig(recompute=recompute),
        batch=BatchConfig(micro_batch_size=scale.micro_batch_size, global_batch_size=scale.global_batch_size),
        optim=OptimConfig(lr=1e-4, lr_schedule="constant", weight_decay=0.0),
        run=RunConfig(train_steps=scale.steps, dtype=scale.dtype),
    )
    return resolve(config, world_size=1)


def check_for_transformers() -> None:
    """ConfigError where it is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"transformers, which this compares with, cannot be imported: {error}. Install the extra hf: "
            "pip install -e '.[hf]'"
        ) from None


def compare(flags: Flags, scale: Scale, config: Config, device: torch.device) -> table.Results:
    """All rounds; the last of our turns has a step more, whose kernels are kept."""
    starts: dict[str, Start] = {OURS: ours, THEIRS: functools.partial(theirs, compiled=flags.compile)}
    results = facts(flags, scale, config, device)
    weights = initial_weights(config)
    for number in range(scale.rounds):
        for name in [*starts][:: -1 if number % 2 else 1]:  # in each round another one is first
            profiled = name == OURS and number == scale.rounds - 1
            found = turn(name, starts[name], config, device, weights, profiled=profiled)
            speed = rates(config, found.step_seconds, 1, results["peak_tflops"])
            run = {"round": number, "name": name, "losses": found.losses, "peak_gib": found.peak_gib, **speed}
            results["runs"].append(run)
            results["kernels"] += [kernel._asdict() for kernel in found.kernels]
            done = f"{len(results['runs'])}/{len(starts) * scale.rounds}"
            print(f"{done} {name}: {1e3 * found.step_seconds:,.0f} ms a step", flush=True)
            if flags.json:  # after each turn: who stops early keeps what there is
                Path(flags.json).write_text(json.dumps(results, indent=1) + "\n")
    return results


def facts(flags: Flags, scale: Scale, config: Config, device: torch.device) -> table.Results:
    """What the figures depend on, and no figures yet."""
    return {
        "device": described(device),
        "device_type": device.type,
        "peak_tflops": peak_tflops(device, flags.peak_tflops),
        "versions": {package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        "parameters": num_parameters(param_table(config.model)),
        "flops_per_token": flops_per_token(config.model),
        "model": asdict(config.model),
        "dtype": scale.dtype,
        "batch": asdict(config.batch),
        "rounds": scale.rounds,
        "steps": scale.steps,
        "recompute": flags.recompute,
        "compiled": flags.compile,
        "runs": [],
        "kernels": [],
    }


# The table


def render(results: table.Results) -> str:
    """The table, what has to be known to read it, and our longest kernels."""
    lines = [
        "| contender | tokens/s (least - most) | MFU | x transformers | peak GiB | first and last loss | loss gap |",
        "|---|---|---|---|---|---|---|",
        *(_line(results, name) for name in (OURS, THEIRS)),
        "",
        *(f"- {note}" for note in _notes(results)),
        "",
        *_kernels(results),
    ]
    return "\n".join(lines)


def largest_gap(results: table.Results) -> float:
    """Between the losses of both in any step of any round; infinite where one is not a number."""
    pairs = [pair for turns in _rounds(results) for pair in zip(*(run["losses"] for run in turns), strict=True)]
    return max(math.inf if math.isnan(one - other) else abs(one - other) for one, other in pairs)


def _rounds(results: table.Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(our turn, transformers' turn) of each."""
    mine, other = ([run for run in results["runs"] if run["name"] == name] for name in (OURS, THEIRS))
    return list(zip(mine, other, strict=True))


def _line(results: table.Results, name: str) -> str:
    runs = [run for run in results["runs"] if run["name"] == name]
    gap, ratios = "", [their["step_seconds"] / our["step_seconds"] for our, their in _rounds(results)]
    if name == OURS:
        gap = f"{largest_gap(results):.1e}" + " **differs**" * (largest_gap(results) > LOSS_GAP[results["dtype"]])
    losses = runs[0]["losses"]
    cells = [
        name,
        _spread([run["tokens_per_second"] for run in runs], "{:,.0f}".format),
        _spread([run["mfu"] for run in runs], "{:.1%}".format),
        _spread(ratios, "{:.2f}".format) if name == OURS else "",
        _spread([run["peak_gib"] for run in runs], "{:.1f}".format),
        f"{losses[0]:.4f}, {losses[-1]:.4f}",
        gap,
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    """Median, least and most of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return shown(statistics.median(known)) + f" ({shown(min(known))} - {shown(max(known))})" * (len(known) > 1)


def _notes(results: table.Results) -> Iterator[str]:
    model, batch, peak = results["model"], results["batch"], results["peak_tflops"]
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    yield f"{results['device']}; {versions}{'' if results['compiled'] else ', without torch.compile'}."
    yield (
        f"{results['parameters']:,} parameters: {model['num_layers']} layers, hidden {model['hidden_size']:,}, "
        f"{model['num_attention_heads']} heads, SwiGLU {model['ffn_hidden_size']:,}, vocabulary "
        f"{model['vocab_size']:,}, sequence {model['seq_length']:,}; {results['dtype']}; megatron3d recomputes: "
        f"{results['recompute']}."
    )
    yield (
        f"{results['rounds']} rounds of {results['steps']} steps, the first {min(WARMUP, results['steps'] - 1)} not "
        f"timed; {batch['global_batch_size']} samples a step in microbatches of {batch['micro_batch_size']}."
    )
    yield f"{results['flops_per_token'] / 1e6:,.1f} MFLOP a token, causal attention counted once; " + (
        f"MFU is of {peak:,.1f} TFLOP/s." if peak else "the device's peak is not known, so there is no MFU."
    )


def _kernels(results: table.Results) -> Iterator[str]:
    """The longest ones of one of our steps."""
    kind = "kernel" if results["device_type"] == "cuda" else "operation"
    if not results["kernels"]:
        yield f"torch's profiler saw no {kind} in a step of megatron3d."
        return
    total = sum(kernel["ms"] for kernel in results["kernels"])
    yield f"The longest of one step of megatron3d, whose {kind}s take {total:,.1f} ms together:"
    yield ""
    yield f"| {kind} | ms | share | calls |"
    yield "|---|---|---|---|"
    for kernel in results["kernels"][:LISTED]:
        name = kernel["name"] if len(kernel["name"]) <= LONGEST else f"{kernel['name'][:LONGEST]}..."
        yield f"| `{name}` | {kernel['ms']:,.2f} | {kernel['ms'] / total:.1%} | {kernel['calls']:,} |"


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
