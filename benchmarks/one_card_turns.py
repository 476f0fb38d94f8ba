"""What one_card.py compares: our trainer and transformers' Llama with the same work to do, and a turn of one of them.

The one idea: what both have to do is one Config of ours, and their first weights are one set of tensors. A turn builds
a contender, takes all steps and drops it again, so that the peak of memory is its own. The device is waited for before
and after each timed step.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import peers, problem
from megatron3d import rng
from megatron3d.config import Config, JobError, ModelConfig
from megatron3d.data import Datasets, MockDataset, load_microbatch
from megatron3d.dtypes import DTYPES
from megatron3d.huggingface import choose_family, to_huggingface
from megatron3d.interop import Foreign, pack
from megatron3d.layout import whole
from megatron3d.mesh import Mesh
from megatron3d.metrics import peak_memory_bytes
from megatron3d.params import param_table
from megatron3d.trainer import Trainer

Weights = Mapping[str, Tensor]
"""Canonical name -> the whole tensor, on the CPU."""
Step = Callable[[int], float]
"""Takes the step of this number; the mean loss of its batch before the update."""
Start = Callable[[Config, torch.device, Weights], Step]
"""Builds a contender."""


# Contenders


def initial_weights(config: Config) -> Weights:
    """What a run of ours begins with, in its dtype."""
    found = {}
    for spec in param_table(config.model):
        values = torch.ones(spec.shape, dtype=DTYPES[config.run.dtype])
        if spec.init == "normal":
            box = whole(spec.shape)
            rng.init_normal(values, box=box, shape=spec.shape, seed=config.run.seed, name=spec.name, std=spec.std)
        found[spec.name] = values
    return found


def samples(config: Config) -> MockDataset:
    """Both train on these."""
    model = config.model
    return MockDataset(vocab_size=model.vocab_size, seq_length=model.seq_length, seed=config.run.seed)


def ours(config: Config, device: torch.device, weights: Weights) -> Step:
    """The library's own trainer, untouched."""
    trainer = Trainer(config, Mesh.single(device), Datasets(samples(config), None, ""))
    trainer.weights.load(weights)
    trainer.optimizer.reset_masters()
    return lambda _: trainer.step().loss


def theirs(config: Config, device: torch.device, weights: Weights, *, compiled: bool) -> Step:
    """A loop as anyone would write it. Weights and optimizer state are in fp32, as our masters are; autocast makes the
    products bf16 where the run is."""
    dataset, model, loss_of = samples(config), llama(config.model, device, weights), mean_loss
    if compiled:
        # Layer by layer: within a whole compiled model transformers passes a mask, for which there is no flash
        # attention (with torch < 2.14). The layers share one compilation.
        for module in (*model.model.layers, model.model.norm):
            module.compile()
        loss_of = torch.compile(mean_loss)
    optim, batch = config.optim, config.batch
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        first = number * batch.global_batch_size
        for start in range(first, first + batch.global_batch_size, batch.micro_batch_size):
            read = load_microbatch(dataset, start, batch.micro_batch_size)  # (S, B) each
            tokens, labels = (ids.t().contiguous().to(device) for ids in read)
            with torch.autocast(device.type, torch.bfloat16, enabled=config.run.dtype == "bf16"):
                logits = model(input_ids=tokens, use_cache=False).logits
                loss = loss_of(logits, labels) / config.num_microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def llama(model: ModelConfig, device: torch.device, weights: Weights) -> Any:
    """transformers' model of this shape with these weights, in fp32."""
    import transformers

    family = choose_family(model, "llama")
    with device:
        found = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig.from_dict(to_huggingface(model, family)), attn_implementation="sdpa"
        )
    named = {
        module.name: pack(Foreign(*module), [weights[part] for part in module.parts])
        for module in family.tensors(model)
    }
    found.load_state_dict(named)
    return found.float().train()


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of one microbatch, in fp32: logits (B, S, vocabulary), labels (B, S)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


# A turn


class Kernel(NamedTuple):
    """One kind of kernel (on a CPU: of operation) in one step."""

    name: str
    ms: float
    calls: int


class Turn(NamedTuple):
    """What is known of a contender after its steps."""

    step_seconds: float
    """Median of the timed steps."""
    losses: list[float]
    peak_gib: float | None
    """None on a CPU, where the peak of a process cannot be told by turns."""
    kernels: list[Kernel]
    """Of one step more, the longest first; empty if it was not asked for."""


def turn(name: str, start: Start, config: Config, device: torch.device, weights: Weights, *, profiled: bool) -> Turn:
    """All steps of a run. JobError if it does not fit the card."""
    gc.collect()  # the contender before this one, in which there are cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        return taken(start(config, device, weights), config.run.train_steps, device, profiled=profiled)
    except torch.OutOfMemoryError:
        raise JobError(
            f"{name} does not fit {described(device)} with microbatches of {config.batch.micro_batch_size} samples. "
            "Choose a smaller --micro-batch-size, or if it is megatron3d --recompute full."
        ) from None


def taken(step: Step, steps: int, device: torch.device, *, profiled: bool) -> Turn:
    """What `steps` steps show."""

    def settled(number: int) -> float:
        loss = step(number)
        settle(device)
        return loss

    settle(device)
    measured = problem.measure(settled, 0.0, steps)
    seconds = statistics.median(measured.seconds[min(problem.WARMUP, steps - 1) :])
    peak = peak_memory_bytes(device) / 2**30 if device.type == "cuda" else None
    kernels = longest_kernels(lambda: settled(steps), device) if profiled else []
    return Turn(seconds, [loss for loss in measured.losses if loss is not None], peak, kernels)


def settle(device: torch.device) -> None:
    """Waits for what the device has queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def longest_kernels(step: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Kernels of a step by the time that each alone takes of the device, the longest first; operations on a CPU."""
    on_card = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]) as profiler:
        step()
    kind = DeviceType.CUDA if on_card else DeviceType.CPU
    found = [
        Kernel(event.key, (event.self_device_time_total if on_card else event.self_cpu_time_total) / 1e3, event.count)
        for event in profiler.key_averages()
        if event.device_type == kind and not event.is_user_annotation
    ]
    return sorted(found, key=lambda kernel: kernel.ms, reverse=True)


def described(device: torch.device) -> str:
    """The device by its name, and with its memory."""
    if device.type == "cpu":
        return str(peers.machine()["cpu"])
    card = torch.cuda.get_device_properties(device)
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
