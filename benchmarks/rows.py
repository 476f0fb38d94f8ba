"""What is compared with what: rows of layouts, each with this project's goal and the peers that can do the same.

The one idea: the comparison is data. How a contender is started follows from its flags (peers.py), what a layout could
reach from its numbers (bounds.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Library = Literal["plain", "ours", "torch", "deepspeed", "megatron-core"]

MODULES: dict[Library, str] = {
    "plain": "benchmarks.plain",
    "ours": "benchmarks.ours",
    "torch": "benchmarks.torch_peer",
    "deepspeed": "benchmarks.deepspeed_peer",
    "megatron-core": "benchmarks.megatron_core_peer",
}


class Layout(NamedTuple):
    """How the model lies over ranks; the optimizer's state is split over dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    stage_layers: tuple[int, ...] = ()
    """Layers per stage: even where peers, which split them so, run too. Left alone, the trainer splits by weight."""

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return self.dp * self.tp * self.pp

    @property
    def flags(self) -> str:
        """In the trainer's words."""
        flags = f"--tp {self.tp} --pp {self.pp}"
        if self.tp > 1:
            flags += " --sp" if self.sp else " --no-sp"
        if self.stage_layers:
            flags += f" --stage-layers {','.join(map(str, self.stage_layers))}"
        return flags


class Contender(NamedTuple):
    """A library with the flags of its program here."""

    name: str
    library: Library
    flags: str = ""


class Row(NamedTuple):
    """One layout."""

    key: str
    title: str
    layout: Layout
    goal: float
    """Speed over plain PyTorch on one thread, on two cores."""
    peers: tuple[Contender, ...] = ()

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """This project first."""
        return (Contender(OURS, "ours", self.layout.flags), *self.peers)


OURS = "megatron3d"
PLAIN = Contender("plain PyTorch", "plain")

ROWS = (
    Row(
        "dp2",
        "dp 2, ZeRO-1",
        Layout(dp=2),
        1.90,
        (
            Contender("DeepSpeed ZeRO-1", "deepspeed", "--zero 1"),
            Contender("DeepSpeed ZeRO-0", "deepspeed", "--zero 0"),
            Contender("torch DDP", "torch"),
            Contender("torch DDP, ZeRO-1", "torch", "--zero"),
        ),
    ),
    Row(
        "tp2",
        "tp 2",
        Layout(tp=2),
        1.50,
        (Contender("megatron-core", "megatron-core", "--tp 2"), Contender("torch DTensor", "torch", "--tp 2")),
    ),
    Row(
        "tp2-sp",
        "tp 2, sequence parallel",
        Layout(tp=2, sp=True),
        1.35,
        (
            Contender("megatron-core", "megatron-core", "--tp 2 --sp"),
            Contender("torch DTensor", "torch", "--tp 2 --sp"),
        ),
    ),
    Row(
        "pp2",
        "pp 2, 2 + 2 layers",
        Layout(pp=2, stage_layers=(2, 2)),
        1.40,
        (
            Contender("torch 1F1B", "torch", "--pp 2"),
            Contender("torch interleaved, 2 chunks", "torch", "--pp 2 --chunks 2"),
            Contender("megatron-core", "megatron-core", "--pp 2"),
            Contender("DeepSpeed", "deepspeed", "--pp 2"),
        ),
    ),
    Row("pp2-3-1", "pp 2, 3 + 1 layers", Layout(pp=2, stage_layers=(3, 1)), 1.60),
    Row(
        "pp4",
        "pp 4, 1 + 1 + 1 + 1 layers",
        Layout(pp=4, stage_layers=(1, 1, 1, 1)),
        1.65,
        (Contender("torch 1F1B", "torch", "--pp 4"),),
    ),
    Row("pp4-2-1-1-0", "pp 4, 2 + 1 + 1 + 0 layers", Layout(pp=4, stage_layers=(2, 1, 1, 0)), 1.65),
    Row(
        "dp2-pp2",
        "dp 2 x pp 2, ZeRO-1",
        Layout(dp=2, pp=2, stage_layers=(2, 2)),
        1.85,
        (
            Contender("torch DDP and 1F1B", "torch", "--pp 2"),
            Contender("megatron-core", "megatron-core", "--pp 2 --zero"),
        ),
    ),
    Row(
        "tp2-pp2",
        "tp 2 x pp 2",
        Layout(tp=2, pp=2, stage_layers=(2, 2)),
        1.40,
        (
            Contender("megatron-core", "megatron-core", "--tp 2 --pp 2"),
            Contender("torch DTensor and 1F1B", "torch", "--tp 2 --pp 2"),
        ),
    ),
    Row(
        "dp2-tp2",
        "dp 2 x tp 2, ZeRO-1",
        Layout(dp=2, tp=2),
        1.40,
        (
            Contender("megatron-core", "megatron-core", "--tp 2 --zero"),
            Contender("torch FSDP2 and DTensor", "torch", "--tp 2"),
        ),
    ),
    Row(
        "dp2-tp2-pp2",
        "dp 2 x tp 2 x pp 2, ZeRO-1",
        Layout(dp=2, tp=2, pp=2, stage_layers=(2, 2)),
        1.35,
        (
            Contender("megatron-core", "megatron-core", "--tp 2 --pp 2 --zero"),
            Contender("torch FSDP2, DTensor and 1F1B", "torch", "--tp 2 --pp 2"),
        ),
    ),
    Row(
        "dp2-tp2-pp2-sp",
        "dp 2 x tp 2 x pp 2, ZeRO-1, sequence parallel",
        Layout(dp=2, tp=2, pp=2, sp=True, stage_layers=(2, 2)),
        1.25,
        (
            Contender("megatron-core", "megatron-core", "--tp 2 --pp 2 --sp --zero"),
            Contender("torch FSDP2, DTensor and 1F1B", "torch", "--tp 2 --pp 2 --sp"),
        ),
    ),
)
