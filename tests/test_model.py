"""The model stage: its parameters against the table, its function against the reference, what it keeps for backward."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron3d import rng
from megatron3d.config import Config, ModelConfig, RopeScaling
from megatron3d.layout import volume
from megatron3d.mesh import Mesh
from megatron3d.model import Block, Dropout
from megatron3d.params import param_table
from megatron3d.trainer import Trainer, build_model
from tests import reference, toy
from tests.lone import lone_rank, lone_trainer, reference_weights
from tests.ranks import on_mesh

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16)
MODELS = {
    "llama3": replace(toy.LLAMA, rope_theta=500000.0, rope_scaling=SCALING),
    "gpt2": toy.GPT2,
    "qwen2.5": replace(toy.LLAMA, bias="qkv", tied_embeddings=True, num_query_groups=1),
    "qwen3": replace(toy.LLAMA, qk_norm=True, head_dim=24, num_query_groups=4),
    "gelu": replace(toy.GPT2, activation="gelu", num_query_groups=2, tied_embeddings=False, qk_norm=True),
}
FAMILIES = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@FAMILIES
def test_modules_and_table_agree_on_every_rank(model: ModelConfig) -> None:
    """Names and shapes of the modules; and over the stages of a mesh each value is a parameter of some rank."""
    for tp, pp in ((1, 1), (2, 1), (4, 2), (2, 3)):
        config = toy.config(model, tp=tp, pp=pp)
        values = dict.fromkeys((spec.name for spec in param_table(config.model)), 0)
        for rank in range(tp * pp):
            parts = build_model(config, lone_rank(config.parallel, rank))
            tensors = [slot.tensor for bucket in parts.weights.layout.buckets for slot in bucket.slots]
            tensors += [parts.weights.layout.tied_use] if parts.weights.layout.tied_use else []
            found = {name: tuple(parameter.shape) for name, parameter in parts.stage.named_parameters()}
            named = dict(parts.stage.named_parameters(remove_duplicate=False))
            assert {tensor.name: tensor.shape for tensor in tensors} == {
                name: tuple(p.shape) for name, p in named.items()
            }
            assert set(found) <= set(named)
            for tensor in tensors:
                for part in tensor.parts if not tensor.is_tied_use else ():
                    values[part.spec.name] += volume(part.box)
        for spec in param_table(config.model, tp=tp, sp=True):
            assert values[spec.name] == spec.size * (1 if spec.shard else tp), spec.name


@pytest.mark.parametrize("stage_layers", [(3, 2), (1, 4)])
def test_no_layer_is_lost(stage_layers: tuple[int, ...]) -> None:
    """DIV-01: 5 layers on 2 stages are built 5 times in all."""
    config = toy.config(
        replace(toy.LLAMA, num_layers=5), pp=2, stage_layers=stage_layers if stage_layers[0] < 2 else ()
    )
    assert config.parallel.stage_layers == stage_layers
    stages = [build_model(config, lone_rank(config.parallel, rank)).stage for rank in range(2)]
    blocks = [sum(isinstance(module, Block) for module in stage.modules()) for stage in stages]
    assert tuple(blocks) == stage_layers and sum(blocks) == 5


@FAMILIES
def test_logits_are_those_of_the_reference(model: ModelConfig) -> None:
    config = toy.config(model, dtype="fp64")
    trainer = lone_trainer(config)
    tokens, _ = toy.global_batch(config.model, 0, 2)
    expected = reference.logits(tokens, reference_weights(config), config.model)
    found = trainer.stage(tokens.t().contiguous())[..., : config.model.vocab_size].transpose(0, 1)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-12


def gradients(config: Config) -> list[Tensor]:
    """Gradient buffers of one step's microbatches on one rank."""
    trainer = lone_trainer(config)
    trainer.step()
    return trainer.grads.buckets


def step_on_mesh(mesh: Mesh, config: Config) -> list[Tensor]:
    trainer = Trainer(config, mesh, toy.datasets(config.model))
    trainer.step()
    return trainer.grads.buckets


@pytest.mark.parametrize("model", [toy.LLAMA, toy.GPT2], ids=["llama", "gpt2"])
def test_recompute_repeats_the_same_dropout(model: ModelConfig) -> None:
    """NUM-10: dropout 0.1; gradients with selective and full recomputation are bit-equal to those without."""
    knobs: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2}
    model = replace(model, dropout=0.1)
    base = gradients(toy.config(model, **knobs))
    dry = gradients(toy.config(replace(model, dropout=0.0), **knobs))
    assert any(not torch.equal(a, b) for a, b in zip(base, dry, strict=True)), "dropout does something"
    for recompute in ("selective", "full"):
        other = gradients(toy.config(model, recompute=recompute, **knobs))
        assert all(torch.equal(a, b) for a, b in zip(other, base, strict=True)), recompute


@pytest.mark.slow
def test_recompute_on_a_tensor_parallel_mesh() -> None:
    """NUM-10 under tp and sp: the collectives inside a block are repeated too."""
    configs = [
        toy.config(replace(toy.LLAMA, dropout=0.1), tp=2, global_batch_size=2, recompute=recompute)
        for recompute in ("none", "selective", "full")
    ]
    ranks = on_mesh(configs[0].parallel, lambda mesh: [step_on_mesh(mesh, config) for config in configs])
    for base, *others in ranks:
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(other, base, strict=True))


def test_dropout_is_off_in_evaluation_and_on_in_training() -> None:
    config = toy.config(replace(toy.LLAMA, dropout=0.5))
    stage = lone_trainer(config).stage
    tokens, labels = (value.t().contiguous() for value in toy.global_batch(config.model, 0, 2))
    without = lone_trainer(toy.config(toy.LLAMA)).stage(tokens, labels)
    assert torch.equal(stage(tokens, labels), without)
    one, again, other = (stage(tokens, labels, samples) for samples in ((0, 1), (0, 1), (0, 2)))
    assert torch.equal(one, again) and not torch.equal(one, without)
    assert torch.equal(one[:, 0], other[:, 0]) and not torch.equal(one[:, 1], other[:, 1]), "keyed by the sample alone"


def test_every_dropout_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the embedding, two in each block; each draws by its layer and site, and by the sample."""
    drawn: list[tuple[int, int, int, tuple[int, ...]]] = []
    draw = rng.dropout_mask

    def watch(shape: Any, **key: Any) -> Tensor:
        drawn.append((key["layer"], key["site"], key["first_row"], tuple(key["samples"])))
        return draw(shape, **key)

    monkeypatch.setattr(rng, "dropout_mask", watch)
    config = toy.config(replace(toy.LLAMA, dropout=0.1), global_batch_size=4, micro_batch_size=2)
    trainer = lone_trainer(config)
    trainer.consumed_samples = 40
    trainer.step()
    places = [(0, 0), *((layer, site) for layer in range(4) for site in (1, 2))]
    assert drawn == [(layer, site, 0, samples) for samples in ((40, 41), (42, 43)) for layer, site in places]


def test_sequence_shards_drop_what_the_whole_would() -> None:
    """Under sp rank 1 of 2 holds the second half of the rows, and drops there what one rank alone drops."""
    x = torch.ones(16, 2, 64)
    whole = Dropout(0.3, 5, Mesh.single().tp, False)(x, (7, 8), 2, 1)
    assert 0 < (whole == 0).sum() < whole.numel()
    for rank in range(2):
        axis = lone_rank(toy.config(tp=2).parallel, rank).tp
        assert torch.equal(Dropout(0.3, 5, axis, True)(x[:8], (7, 8), 2, 1), whole.chunk(2)[rank])
        assert torch.equal(Dropout(0.3, 5, axis, False)(x, (7, 8), 2, 1), whole)


class Allocations(TorchDispatchMode):
    """Remembers the memory of every tensor that any operation makes, for as long as it lives; not that of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def live_bytes(self) -> int:
        gc.collect()
        return sum(size for key, size in self.storages.items() if key not in self.known and not key.expired())


def bytes_kept(config: Config, mesh: Mesh) -> int:
    """Memory that the forward pass of one microbatch leaves alive for its backward pass."""
    stage = Trainer(config, mesh, toy.datasets(config.model)).stage
    tokens, labels = (x.t().contiguous() for x in toy.global_batch(config.model, 0, config.batch.micro_batch_size))
    with Allocations([*stage.parameters(), *(stage.tables or ()), tokens, labels]) as allocations:
        loss = stage(tokens, labels, (0, 1))
    held: int = allocations.live_bytes()
    assert loss.requires_grad, "the graph is alive"
    return held


@pytest.mark.parametrize("model", [toy.LLAMA, pytest.param(toy.GPT2, marks=pytest.mark.slow)], ids=["llama", "gpt2"])
def test_recompute_saves_memory(model: ModelConfig) -> None:
    """Selective drops the outputs of norms and activation functions, and nothing else; full keeps block inputs."""
    kept = {
        recompute: bytes_kept(toy.config(model, micro_batch_size=2, recompute=recompute), Mesh.single())
        for recompute in ("none", "selective", "full")
    }
    tokens = model.seq_length * 2
    norms_and_functions = 4 * model.num_layers * tokens * (2 * model.hidden_size + model.ffn_hidden_size)
    assert kept["none"] - kept["selective"] == norms_and_functions
    blocks = 4 * model.num_layers * tokens * model.hidden_size
    head = 4 * tokens * (192 + 2 * model.hidden_size) + 64 * tokens  # logits, norm and its input, statistics, indices
    assert blocks <= kept["full"] <= blocks + head


@pytest.mark.slow
def test_sequence_parallelism_saves_sequence_shards() -> None:
    """At tp 2 the hidden states between the linears are halved: block inputs, norm inputs and norm outputs."""
    model = toy.LLAMA
    without, with_sp = (toy.config(model, tp=2, sp=sp, micro_batch_size=2, global_batch_size=2) for sp in (False, True))
    for plain, sharded in on_mesh(
        without.parallel, lambda mesh: [bytes_kept(config, mesh) for config in (without, with_sp)]
    ):
        hidden = 4 * model.seq_length * 2 * model.hidden_size
        # Per block: its input, the residual in its middle, both norms' outputs; then the head's norm, input and output.
        assert plain - sharded >= hidden // 2 * (4 * model.num_layers + 2)


def test_bf16_stays_bf16() -> None:
    """PIPE-09 on one stage: no option keeps the residual stream in another type, and no layer changes it."""
    trainer = lone_trainer(toy.config(dtype="bf16"))
    seen: list[torch.dtype] = []
    for block in trainer.stage.layers.values():
        block.register_forward_hook(lambda module, args, y: seen.extend((args[0].dtype, y.dtype)))
    trainer.step()
    assert set(seen) == {torch.bfloat16} and len(seen) == 2 * 4 * 12
    assert {buffer.dtype for buffer in trainer.grads.buckets} == {torch.float32}
