"""megatron-core on CPUs: `torchrun --nproc-per-node 4 -m benchmarks.megatron_core_peer --tp 2 --pp 2`; dp follows.

The one idea: its GPTModel of local (pure torch) layers, its gradient buffers, its optimizer, its pipeline schedules, as
its own training script puts them together. The problem's weights are cut to its layout of names and heads here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import job, megatron_core_on_cpu, problem
from benchmarks.problem import SHAPE

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig


def flags() -> argparse.Namespace:
    """The layout."""
    parser = job.flags()
    for name in ("tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--zero", action="store_true", help="its distributed optimizer")
    return parser.parse_args()


def settings(wanted: argparse.Namespace) -> TransformerConfig:
    """The problem in its words; every fusion that it has is a CUDA kernel."""
    return TransformerConfig(
        num_layers=SHAPE.layers,
        hidden_size=SHAPE.hidden,
        ffn_hidden_size=SHAPE.ffn,
        num_attention_heads=SHAPE.heads,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=problem.EPS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=wanted.tp,
        pipeline_model_parallel_size=wanted.pp,
        sequence_parallel=wanted.sp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def load(model: GPTModel, first_layer: int) -> None:
    """Fills this rank's part of the model, whose layers are counted from the stage's first one."""
    weights = problem.initial_weights()
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    outer = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"].chunk(tp)[rank],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"].chunk(tp)[rank],
    }
    for name, parameter in model.named_parameters():
        parameter.data.copy_(outer[name] if name in outer else inner(name, weights, first_layer, tp, rank))


def inner(name: str, weights: dict[str, Tensor], first_layer: int, tp: int, rank: int) -> Tensor:
    """One tensor of a layer."""
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)

    def theirs(part: str) -> Tensor:
        return weights[f"model.layers.{first_layer + int(layer)}.{part}.weight"]

    def rows(*parts: str) -> list[Tensor]:
        return [theirs(part).chunk(tp)[rank] for part in parts]

    match module:
        case "self_attention.linear_qkv":  # the queries, keys and values of one head lie together
            heads = [
                part.unflatten(0, (SHAPE.heads // tp, -1)) for part in rows(*(f"self_attn.{n}_proj" for n in "qkv"))
            ]
            return torch.cat(heads, 1).flatten(0, 1)
        case "self_attention.linear_proj":
            return theirs("self_attn.o_proj").chunk(tp, 1)[rank]
        case "mlp.linear_fc1":
            return torch.cat(rows("mlp.gate_proj", "mlp.up_proj"))
        case "mlp.linear_fc2":
            return theirs("mlp.down_proj").chunk(tp, 1)[rank]
        case "input_layernorm":
            return theirs("input_layernorm")
        case "pre_mlp_layernorm":
            return theirs("post_attention_layernorm")
    raise ValueError(f"megatron-core has a tensor {name} that this file does not know")


def build(config: TransformerConfig, *, zero: bool) -> tuple[DistributedDataParallel, Any]:
    """This rank's stage in its gradient buffers, and the optimizer."""
    stage, stages = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=SHAPE.vocab,
        max_sequence_length=SHAPE.seq,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="rope",
        rotary_base=problem.THETA,
        share_embeddings_and_output_weights=False,
    )
    load(model, stage * SHAPE.layers // stages)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=zero), model
    )
    beta1, beta2 = problem.BETAS
    settings = OptimizerConfig(
        lr=problem.LR,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=problem.ADAM_EPS,
        weight_decay=0.0,
        clip_grad=0.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=zero,
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)


def forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """One forward pass, and how its output becomes a loss, in the form that its schedules ask for."""
    tokens, labels = next(batches)

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    return model(tokens, torch.arange(SHAPE.seq).expand_as(tokens), None, labels=labels), mean


def main() -> None:
    """Trains and reports."""
    wanted = flags()
    imported = job.begin()
    megatron_core_on_cpu.patch()
    parallel_state.initialize_model_parallel(wanted.tp, wanted.pp, create_gloo_process_groups=False)
    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    model, optimizer = build(settings(wanted), zero=wanted.zero)
    run = get_forward_backward_func()

    def step(number: int) -> float | None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = problem.microbatches(number, dp_rank, dp)
        outputs = run(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=SHAPE.seq,
            micro_batch_size=SHAPE.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        if not parallel_state.is_pipeline_last_stage():
            return None
        total = torch.stack([output["loss"] for output in outputs]).double().mean()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.item() / dp

    job.finish("megatron-core", problem.measure(step, imported, wanted.steps))


if __name__ == "__main__":
    main()
