"""PyTorch's own parallelism: `torchrun --nproc-per-node 4 -m benchmarks.torch_peer --tp 2 --pp 2`; dp follows.

The one idea: the plain model cut into stages, each given to DTensor (tp), to DistributedDataParallel (dp), and to
torch.distributed.pipelining (pp), as their documentation says. The loss stays parallel over the vocabulary, because
gathering logits would cost more than anything else here.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks import job, problem
from benchmarks.plain import Decoder, mean_loss
from benchmarks.problem import SHAPE

Step = Callable[[int], float | None]


def flags() -> argparse.Namespace:
    """The layout."""
    parser = job.flags()
    for name in ("tp", "pp", "chunks"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--zero", action="store_true", help="split the optimizer's state over dp")
    return parser.parse_args()


def tensor_parallel(stage: Decoder, mesh: DeviceMesh, *, sp: bool) -> None:
    """Splits a stage's matrices over `mesh`; between blocks hidden states are whole, or under sp split by position."""
    between = Shard(1) if sp else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for block in ("self_attn", "mlp"):
        at = f"model.layers.*.{block}"
        plan[at] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= {f"{at}.{name}_proj": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"{at}.{name}_proj": RowwiseParallel(output_layouts=between) for name in ("o", "down")}
    if sp:
        norms = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm")
        plan |= dict.fromkeys(norms, SequenceParallel(use_local_output=True))
    parallelize_module(stage, mesh, plan)


def data_parallel(stage: Decoder, mesh: DeviceMesh, *, split: bool) -> nn.Module:
    """The stage with gradients summed over `mesh`.

    DistributedDataParallel refuses what DTensor has split: there fully_shard, whose weights stay whole within a step.
    """
    if not split:
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    for module in (*stage.model.layers.values(), stage):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale within a sum
    return stage


@contextlib.contextmanager
def held_back(model: nn.Module) -> Iterator[None]:
    """Gradients are kept, not summed over the data-parallel ranks."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def loss_value(loss: Tensor) -> float:
    """A loss as a number, also where it is a DTensor."""
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def plain_step(model: nn.Module, dp: DeviceMesh) -> Step:
    """Forward and backward passes of all microbatches of one step; the mean loss of this rank's."""

    def passes(number: int) -> float:
        total, microbatches = 0.0, problem.microbatches(number, dp.get_local_rank(), dp.size())
        for i, (tokens, labels) in enumerate(microbatches):
            waits = dp.size() > 1 and i < len(microbatches) - 1  # gradients are summed behind the last pass only
            with held_back(model) if waits else contextlib.nullcontext():
                loss = mean_loss(model(tokens), labels) / len(microbatches)
                loss.backward()
            total += loss_value(loss)
        return total

    return passes


def pipeline_step(stages: list[nn.Module], numbers: list[int], chunks: int, pp: DeviceMesh, dp: DeviceMesh) -> Step:
    """The same through a pipeline; None where the head is not."""
    group, total = pp.get_group(), chunks * pp.size()
    parts = [
        PipelineStage(stage, number, total, torch.device("cpu"), group=group)
        for stage, number in zip(stages, numbers, strict=True)
    ]
    microbatches = SHAPE.global_batch // SHAPE.micro_batch // dp.size()
    schedule = (
        Schedule1F1B(parts[0], microbatches, loss_fn=mean_loss)
        if chunks == 1
        else ScheduleInterleaved1F1B(parts, microbatches, loss_fn=mean_loss)
    )

    def passes(number: int) -> float | None:
        tokens, labels = map(torch.cat, zip(*problem.microbatches(number, dp.get_local_rank(), dp.size()), strict=True))
        inputs = (tokens,) if 0 in numbers else ()
        if total - 1 not in numbers:
            schedule.step(*inputs, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        return sum(map(loss_value, losses)) / len(losses)

    return passes


def mean_over(dp: DeviceMesh, loss: float) -> float:
    """Mean of a number over the data-parallel ranks."""
    total = torch.tensor(loss, dtype=torch.float64)
    if dp.size() > 1:
        dist.all_reduce(total, group=dp.get_group())
    return total.item() / dp.size()


def main() -> None:
    """Trains and reports."""
    wanted = flags()
    imported = job.begin()
    dp_size = dist.get_world_size() // (wanted.tp * wanted.pp)
    mesh = init_device_mesh("cpu", (wanted.pp, dp_size, wanted.tp), mesh_dim_names=("pp", "dp", "tp"))
    tp, pp, dp = mesh["tp"], mesh["pp"], mesh["dp"]

    per_stage = SHAPE.layers // (wanted.pp * wanted.chunks)
    numbers = list(range(pp.get_local_rank(), wanted.pp * wanted.chunks, wanted.pp))
    stages: list[nn.Module] = []
    for number in numbers:
        stage = Decoder(range(number * per_stage, (number + 1) * per_stage))
        if wanted.tp > 1:
            tensor_parallel(stage, tp, sp=wanted.sp)
        stages.append(data_parallel(stage, dp, split=wanted.tp > 1) if dp_size > 1 else stage)

    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = (
        ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=dp.get_group(), **problem.ADAMW)
        if wanted.zero
        else torch.optim.AdamW(parameters, **problem.ADAMW)
    )
    piped = wanted.pp > 1
    passes = pipeline_step(stages, numbers, wanted.chunks, pp, dp) if piped else plain_step(stages[0], dp)

    def step(number: int) -> float | None:
        with loss_parallel() if wanted.tp > 1 else contextlib.nullcontext():
            loss = passes(number)
        optimizer.step()
        optimizer.zero_grad()
        return None if loss is None else mean_over(dp, loss)

    job.finish("torch", problem.measure(step, imported, wanted.steps))


if __name__ == "__main__":
    main()
