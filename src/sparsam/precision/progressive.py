"""From a high format to a low one, a growing share of the products; a function of the step and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparsam.kernels.formats import PRODUCTS, ProductFormat
from sparsam.precision.policies import Evidence, Policy, UnitState
from sparsam.precision.rules import Rules, by_name

__all__ = ["Progressive"]


class Progressive(Policy):
    """Converts one product after another, each in one go: formats are never blended.

    Of n products, number i (from 0) is converted when (step - begin) / transition_steps >= (i + 1) / n. Gradients come
    first, from the first layer on; then forward products, from the last layer back. So at any time what has been
    rounded reaches as few other products as it can: a gradient is passed on to the layers before, an output to those
    after. Of a layer's two gradients the weight gradient comes second, which suffers most from few bits.

    The head, outputs of attention and whatever `rules` name are not converted: they stay in the format that `Rules`
    with `low=initial` gives them.

    Args:
        initial: the format before.
        final: the format after, of fewer bits.
        transition_steps: applied steps from the first conversion's start to the last one's end.
        begin: applied step at which the transition starts: the end of the learning rate's warm-up.
        cooldown_at: applied step from which forward products are in `initial` again, before the last decay of the
            learning rate; None = never. Gradients go on as before.
        rules: glob -> format, as in `Rules`.
        head: format of the head's products.

    Raises:
        ValueError: no format has such a name, `final` has no fewer bits, or steps are out of range; in `start`, a rule
            matches nothing.
    """

    def __init__(
        self,
        initial: str | ProductFormat = "fp16",
        final: str | ProductFormat = "fp8",
        transition_steps: int = 8000,
        begin: int = 0,
        cooldown_at: int | None = None,
        rules: Mapping[str, str | ProductFormat] | None = None,
        head: str | ProductFormat = "fp32",
    ) -> None:
        self.initial, self.final = by_name(initial), by_name(final)
        if self.final.bits >= self.initial.bits:
            raise ValueError(
                f"Progressive: expected a final format of fewer bits than {self.initial}, got {self.final}. "
                "Choose a lower one, or use Rules for formats that stay."
            )
        if transition_steps < 1:
            raise ValueError(f"transition_steps: expected at least 1, got {transition_steps}. Use Rules for no steps.")
        if begin < 0:
            raise ValueError(f"begin: expected a step, 0 or later, got {begin}.")
        if cooldown_at is not None and cooldown_at < begin:
            raise ValueError(
                f"cooldown_at: expected a step after begin ({begin}), got {cooldown_at}. Use None for never."
            )
        self.transition_steps, self.begin, self.cooldown_at = transition_steps, begin, cooldown_at
        self._rules = Rules(rules, low=self.initial, head=head)

    @property
    def lowest(self) -> tuple[ProductFormat, ...]:
        """All formats that it names, the lowest first."""
        named = dict.fromkeys((self.final, *self._rules.lowest))
        return tuple(sorted(named, key=lambda one: one.bits))

    def start(self, units: tuple[str, ...]) -> Mapping[str, UnitState]:
        named = self._rules.named(units)
        initial = self.initial.name
        state = {
            unit: UnitState(named[unit].name, pinned=True) if unit in named else UnitState(initial) for unit in units
        }
        return self.decide(state, Evidence(), 0)

    def reach(self, one: UnitState) -> tuple[ProductFormat, ...]:
        return super().reach(one) if one.pinned else (self.initial, self.final)

    def decide(self, state: Mapping[str, UnitState], evidence: Evidence, step: int) -> Mapping[str, UnitState]:
        order = conversion_order(tuple(unit for unit, one in state.items() if not one.pinned))
        # whole numbers: a quotient may come out a hair below the step at which it is due
        converted = set(order[: self._steps_in(step) * len(order) // self.transition_steps])
        if self.cooldown_at is not None and step >= self.cooldown_at:
            converted = {unit for unit in converted if not unit.endswith(f"/{PRODUCTS[0]}")}
        return {
            unit: one if one.pinned else replace(one, format=(self.final if unit in converted else self.initial).name)
            for unit, one in state.items()
        }

    def converted_share(self, step: int) -> float:
        """Share of the products in question that the transition has reached after `step` applied steps, 0..1; those
        that `cooldown_at` gives back count as reached."""
        return self._steps_in(step) / self.transition_steps

    def _steps_in(self, step: int) -> int:
        return min(max(step - self.begin, 0), self.transition_steps)


def conversion_order(units: tuple[str, ...]) -> list[str]:
    """Units in the order in which they are converted, from their order in the model."""
    forward, input_gradient, weight_gradient = (f"/{product}" for product in PRODUCTS)
    layers = dict.fromkeys(unit.rpartition("/")[0] for unit in units)
    order = [layer + product for layer in layers for product in (input_gradient, weight_gradient)]
    order += [layer + forward for layer in reversed(layers)]
    held = set(units)
    return [unit for unit in order if unit in held]
