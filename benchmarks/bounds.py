"""The most that a layout could reach: pure arithmetic from how fast this machine multiplies and sends.

The one idea: nobody can do without the matrix products, the pipeline's order and the messages, so a step lasts at least
as long as the longest of these two:

    the way through it    each rank's products and tensor-parallel messages, in the order of the pipeline (schedule.py)
    the work in it        all ranks' products and all messages, shared by the cores there are

Data-parallel messages may travel behind the backward pass, so they are in the work and not on the way. Norms,
activations, the loss and the optimizer count as nothing. Speeds are measured in speeds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.problem import SHAPE
from benchmarks.rows import Layout
from megatron3d.schedule import Op, build, simulate, split_layers

FP32 = 4  # bytes
HIDDEN = FP32 * SHAPE.micro_batch * SHAPE.seq * SHAPE.hidden  # bytes of one microbatch's hidden states


class Passes(NamedTuple):
    """Something of a forward and of a backward pass of one microbatch."""

    forward: float
    backward: float


class Speeds(NamedTuple):
    """Of this machine, by tensor-parallel size where that matters; in seconds."""

    layer: Mapping[int, Passes]
    """Bare products of one layer."""
    head: Mapping[int, Passes]
    """Bare products of the head."""
    byte: float
    """Until a byte has been sent while another was received."""
    byte_work: float
    """Of a core, for the same."""

    @staticmethod
    def from_json(values: dict[str, Any]) -> Speeds:
        """Of what speeds.py prints."""
        layer, head = ({int(tp): Passes(*passes) for tp, passes in values[key].items()} for key in ("layer", "head"))
        return Speeds(layer, head, values["byte"], values["byte_work"])


def step_seconds(layout: Layout, speeds: Speeds, cores: int) -> float:
    """Least time of one step."""
    microbatches = SHAPE.global_batch // SHAPE.micro_batch // layout.dp
    stages = [Stage(layout, number) for number in range(layout.pp)]

    def duration(op: Op) -> float:
        products, sent = stages[op.stage].products(speeds), stages[op.stage].tp_bytes()
        return (
            products.forward + speeds.byte * sent.forward
            if op.kind == "F"
            else products.backward + speeds.byte * sent.backward
        )

    lists = build("1f1b", layout.pp, microbatches)
    spans = simulate(lists, range(layout.pp), duration, latency=speeds.byte * pp_bytes(layout))
    work = sum(
        microbatches * (sum(stage.products(speeds)) + speeds.byte_work * sum(stage.tp_bytes()))
        + speeds.byte_work * (microbatches * stage.pp_messages * pp_bytes(layout) + stage.dp_bytes())
        for stage in stages
    )
    return max(max(span.end for span in spans.values()), work * layout.dp * layout.tp / cores)


def pp_bytes(layout: Layout) -> float:
    """Of one message between stages, from one rank."""
    return HIDDEN / (layout.tp if layout.sp else 1)


class Stage(NamedTuple):
    """What one rank of a pipeline stage computes and sends."""

    layout: Layout
    number: int

    @property
    def layers(self) -> int:
        """Blocks of the stage."""
        return (self.layout.stage_layers or split_layers(SHAPE.layers, self.layout.pp))[self.number]

    @property
    def is_first(self) -> bool:
        """Has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Has the head."""
        return self.number == self.layout.pp - 1

    @property
    def pp_messages(self) -> int:
        """Sent per microbatch: forward unless last, backward unless first."""
        return 2 - self.is_first - self.is_last

    def products(self, speeds: Speeds) -> Passes:
        """Seconds of the bare products of a microbatch."""
        layer, head = speeds.layer[self.layout.tp], speeds.head[self.layout.tp]
        return Passes(*(self.layers * a + self.is_last * b for a, b in zip(layer, head, strict=True)))

    def tp_bytes(self) -> Passes:
        """Sent by one rank to its tensor-parallel neighbours for a microbatch.

        Counted in gathers of hidden states; a scattered sum is as much, a sum of whole states two. A block has two
        sums in each direction, an embedding one forward, a head one backward. Under sequence parallelism a sum is a
        scattered sum and a gather, the first and the last of them apart; the backward pass gathers again what was kept
        as shards.
        """
        sp, tp = self.layout.sp, self.layout.tp
        forward = 4 * self.layers + (2 - sp) * self.is_first + sp * self.is_last
        backward = (4 + 2 * sp) * self.layers + sp * self.is_first + 2 * self.is_last
        gather = HIDDEN * (tp - 1) / tp
        return Passes(forward * gather, backward * gather)

    def dp_bytes(self) -> float:
        """Sent by one rank per step: a scattered sum of the gradients, a gather of the weights."""
        block = 4 * SHAPE.hidden**2 + 3 * SHAPE.hidden * SHAPE.ffn
        matrices = self.layers * block + (self.is_first + self.is_last) * SHAPE.vocab * SHAPE.hidden
        return 2 * FP32 * matrices / self.layout.tp * (self.layout.dp - 1) / self.layout.dp
