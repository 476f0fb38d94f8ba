"""What a run does about bad news: gradients that are not finite, overflows, loss spikes.

The one idea: the news is in the result of a step, the same on all ranks; so all of them decide alike, and only the
search for where it began costs a message.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron3d.comm import gather_objects
from megatron3d.config import JobError, RunConfig
from megatron3d.loss_scale import LossScale
from megatron3d.mesh import Mesh
from megatron3d.nonfinite import LayerWatch, bad_gradient
from megatron3d.optimizer import Optimizer, StepResult
from megatron3d.spikes import SpikeDetector


class Policy:
    """Judges each step; `say` prints a line on the main rank."""

    def __init__(self, run: RunConfig, optimizer: Optimizer, mesh: Mesh, say: Callable[[str], None]) -> None:
        self.run, self.optimizer, self.mesh, self.say = run, optimizer, mesh, say
        self.spikes = SpikeDetector(window=run.spike_window, sigmas=run.spike_sigmas)

    def judge(self, step: int, result: StepResult, scale: LossScale, bad_steps: int, watch: LayerWatch | None) -> None:
        """Says what was wrong with a step; raises JobError, on all ranks, when the run must not go on.

        `scale` is the loss scale after the step, `bad_steps` the number of bad ones in a row, this one included.
        """
        if not result.applied:
            self.say(self._skipped(step, result, scale, bad_steps, watch))
        if bad_steps >= self.run.max_bad_steps:
            raise JobError(
                f"{bad_steps} steps in a row, up to step {step}, had no finite gradient or loss (--max-bad-steps "
                f"{self.run.max_bad_steps}). Nothing of them was applied or saved; go on from the last checkpoint with "
                f"a lower --lr, or look for the layer with --find-nan."
            )
        height = self.spikes.see(result.loss)
        if height:
            text = f"step {step}: loss {result.loss:.4f} is {height:.1f} standard deviations above its recent course"
            if self.run.stop_on_spike:
                raise JobError(f"{text} (--stop-on-spike).")
            self.say(f"warning: {text}")

    def _skipped(
        self, step: int, result: StepResult, scale: LossScale, bad_steps: int, watch: LayerWatch | None
    ) -> str:
        if result.valid_tokens == 0:
            return f"step {step} skipped: none of its tokens is valid"
        if scale.enabled and not bad_steps:
            return f"step {step} skipped: overflow; loss scale now {scale.value:g}"
        found = gather_objects((bad_gradient(self.optimizer), watch.found if watch else ""), self.mesh.control)
        text = f"step {step} skipped, {bad_steps} in a row"
        for rank, (parameter, layer) in enumerate(found):
            if parameter or layer:
                stage = self.mesh.grid.coordinates(rank)["pp"]
                what = f"gradient of {parameter}" if parameter else "loss"
                text += f": {what} is not finite (rank {rank}, stage {stage})"
                return text + (f"; first seen in the output of {layer}" if layer else "")
        return f"{text}: loss {result.loss}, gradient norm {result.grad_norm}"
