"""DeepSpeed on CPUs: `torchrun --nproc-per-node 2 -m benchmarks.deepspeed_peer --zero 1`; dp follows from `--pp`.

The one idea: the plain model in DeepSpeed's engine, or cut into the list of layers that its pipeline wants. torch's own
AdamW, because DeepSpeed's is an extension that a compiler would have to build.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # read when it is imported

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.utils import logger
from torch import Tensor, nn

from benchmarks import job, problem
from benchmarks.plain import Decoder, mean_loss
from benchmarks.problem import SHAPE

Step = Callable[[int], float | None]


def flags() -> argparse.Namespace:
    """The layout."""
    parser = job.flags()
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    return parser.parse_args()


def settings(zero: int, dp: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_batch_size": SHAPE.global_batch,
        "train_micro_batch_size_per_gpu": SHAPE.micro_batch,
        "gradient_accumulation_steps": SHAPE.global_batch // SHAPE.micro_batch // dp,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }


class Head(nn.Module):
    """Norm and output matrix."""

    def __init__(self, whole: Decoder) -> None:
        super().__init__()
        self.norm, self.output = whole.model.norm, whole.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states -> logits."""
        return self.output(self.norm(x))


def pipeline(pp: int, dp: int) -> nn.Module:
    """The model as layers in a row; each stage has as many blocks, the embedding and the head come with the outer."""
    whole = Decoder()
    layers = [whole.model.embed_tokens, *whole.model.layers.values(), Head(whole)]
    return PipelineModule(
        layers=layers,
        topology=PipeDataParallelTopology(num_pp=pp, num_dp=dp),
        loss_fn=mean_loss,
        partition_method="type:Block",
        activation_checkpoint_interval=0,
    )


def data_parallel_step(engine: Any, rank: int, dp: int) -> Step:
    """The engine counts microbatches itself: its `step` works after the last one of a global batch only."""

    def step(number: int) -> float:
        total, microbatches = 0.0, problem.microbatches(number, rank, dp)
        for tokens, labels in microbatches:
            loss = mean_loss(engine(tokens), labels)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(microbatches)
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item() / dp

    return step


def pipeline_step(engine: Any, dp: int) -> Step:
    """The pipeline takes microbatches from an iterator, and tells every rank the loss."""
    rank = engine.grid.get_data_parallel_rank()

    def step(number: int) -> float:
        return float(engine.train_batch(data_iter=iter(problem.microbatches(number, rank, dp))))

    return step


def main() -> None:
    """Trains and reports."""
    wanted = flags()
    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference only, and minutes of a compiler
    deepspeed.init_distributed(dist_backend="gloo", timeout=job.TIMEOUT, verbose=False)
    imported = job.begin()
    dp = dist.get_world_size() // wanted.pp
    model = pipeline(wanted.pp, dp) if wanted.pp > 1 else Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), **problem.ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(wanted.zero, dp))
    step = pipeline_step(engine, dp) if wanted.pp > 1 else data_parallel_step(engine, dist.get_rank(), dp)
    job.finish("DeepSpeed", problem.measure(step, imported, wanted.steps))


if __name__ == "__main__":
    main()
