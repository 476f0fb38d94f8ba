"""The dynamic loss scale of fp16: a pure state that follows from which steps were finite.

The one idea: fp16 gradients underflow, so the loss is multiplied by as large a factor as does not overflow. A step
whose gradients overflow is skipped by all ranks alike and may lower the scale; a long run of good ones raises it. All
ranks see the same norm, hence the same next state; it is four numbers in a checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

INITIAL = 2.0**16
WINDOW = 1000  # good steps after which the scale doubles
HYSTERESIS = 2  # overflows, without a doubling between them, after which it halves
FLOOR = 1.0


@dataclass(frozen=True)
class LossScale:
    """The scale and what its next change depends on. `enabled` False is the constant 1 of all other dtypes."""

    enabled: bool = False
    value: float = 1.0
    good_steps: int = 0
    """Finite steps since the last change or overflow."""
    patience: int = HYSTERESIS
    """Overflows left before the scale halves."""
    at_floor: int = 0
    """Overflows in a row with the scale at its floor."""

    @staticmethod
    def initial(*, fp16: bool) -> LossScale:
        """Where a run begins."""
        return LossScale(enabled=True, value=INITIAL) if fp16 else LossScale()

    def after(self, *, finite: bool) -> LossScale:
        """The state after a step."""
        if not self.enabled:
            return self
        if finite:
            if self.good_steps + 1 < WINDOW:
                return replace(self, good_steps=self.good_steps + 1, at_floor=0)
            return LossScale(enabled=True, value=2 * self.value)
        if self.value <= FLOOR:
            return replace(self, good_steps=0, at_floor=self.at_floor + 1)
        if self.patience > 1:
            return replace(self, good_steps=0, patience=self.patience - 1)
        return replace(self, value=max(FLOOR, self.value / 2), good_steps=0)

    def state(self) -> dict[str, float]:
        """For a checkpoint; LossScale(**state) is the same again."""
        return asdict(self)
