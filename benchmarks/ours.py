"""megatron3d on the problem: `torchrun --nproc-per-node 4 -m benchmarks.ours --tp 2 --pp 2`, flags as of the trainer.

The trainer is the library's own, untouched; only its weights and samples are set from the problem.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import problem
from benchmarks.problem import SHAPE
from megatron3d.cli import parse
from megatron3d.comm import gather_objects
from megatron3d.data import Datasets
from megatron3d.heap import keep_freed_memory
from megatron3d.launch import launch_from_environment, leave, user_errors
from megatron3d.mesh import Mesh
from megatron3d.trainer import Trainer

FLAGS = (
    f"--num-layers {SHAPE.layers} --hidden-size {SHAPE.hidden} --ffn-hidden-size {SHAPE.ffn} "
    f"--num-attention-heads {SHAPE.heads} --vocab-size {SHAPE.vocab} --seq-length {SHAPE.seq} "
    f"--rope-theta {problem.THETA} --norm-epsilon {problem.EPS} --micro-batch-size {SHAPE.micro_batch} "
    f"--global-batch-size {SHAPE.global_batch} --lr {problem.LR} --lr-schedule constant --weight-decay 0 "
    f"--beta1 {problem.BETAS[0]} --beta2 {problem.BETAS[1]} --eps {problem.ADAM_EPS} --clip-grad 0 "
    f"--train-steps {problem.STEPS} --mock-data --device cpu"
)


@dataclass(frozen=True)
class ProblemData:
    """The problem's samples by number."""

    size: int = 0
    seq_length: int = SHAPE.seq

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, labels), (S,) each."""
        step, row = divmod(index, SHAPE.global_batch)
        ids = problem.global_batch(step)[row].numpy()
        return ids[:-1], ids[1:]


THEIRS = {
    "embedding.word": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.output": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{ours}": f"self_attn.{ours[0]}_proj" for ours in ("query", "key", "value", "output")},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def our_weights() -> dict[str, Tensor]:
    """The problem's weights under canonical names."""
    weights, ours = problem.initial_weights(), {theirs: name for name, theirs in THEIRS.items()}
    renamed = {}
    for name, value in weights.items():
        words = name.removesuffix(".weight").split(".")
        layer = words[1:3] if words[:2] == ["model", "layers"] else []
        module = ".".join(words[3:] if layer else words)
        renamed[".".join([*layer, ours[module], "weight"])] = value
    return renamed


def main(argv: list[str]) -> None:
    """Trains and reports."""
    torch.set_num_threads(1)
    launch = launch_from_environment()
    config = parse([*FLAGS.split(), *argv], launch)
    mesh = Mesh.create(config.parallel, launch, torch.device("cpu"))
    keep_freed_memory()
    imported = problem.resident_mib()
    trainer = Trainer(config, mesh, Datasets(ProblemData(), None, ""))
    trainer.weights.load(our_weights())
    trainer.optimizer.reset_masters()
    measured = problem.measure(lambda _: trainer.step().loss, imported, config.run.train_steps)
    ranks = gather_objects(measured, mesh.control)
    if mesh.is_main:
        problem.report("megatron3d", ranks)
    mesh.close()
    leave(0)


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
