"""Fits what a description of a cluster leaves open to measured steps: how slow ranks are that share a machine, what of
a link's rate arrives, what a message and a byte cost. Then it predicts steps that nobody has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparsam.plan.network import Link, Network
from sparsam.plan.predict import Prediction, Setting, predict

__all__ = ["Fit", "Observation", "fitted"]

# where the answer is looked for: seconds a message, share of the rate, processor seconds a byte, slowness of ranks
_ALPHA, _SHARE, _PER_BYTE, _FACTOR = (1e-6, 3e-2), (0.5, 1.0), (1e-11, 1e-7), (0.05, 50.0)


@dataclass(frozen=True)
class Observation:
    """One measured step.

    Attributes:
        setting: what was done, with the compute of one rank that has the machine for itself.
        group: settings of one group compute at the same speed.
        ranks: all on links of their own.
        bits_per_second: what the links were set to.
        seconds: of the step.
    """

    setting: Setting
    group: str
    ranks: int
    bits_per_second: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What was open.

    Attributes:
        alpha: seconds a message.
        share: of the nominal rate that arrives.
        seconds_per_byte: of the processor, for a byte that is sent.
        factors: (group, ranks) -> how many times longer a rank computes than one that is alone.
    """

    alpha: float
    share: float
    seconds_per_byte: float
    factors: dict[tuple[str, int], float]

    def predict(self, setting: Setting, group: str, ranks: int, bits_per_second: float) -> Prediction:
        """The step of a setting.

        Raises:
            ValueError: nothing of its group was measured on so many ranks.
        """
        factor = self.factors.get((group, ranks))
        if factor is None:
            known = ", ".join(f"{name} on {count}" for name, count in self.factors)
            raise ValueError(f"{setting.name}: expected a fit of {group} on {ranks} ranks, got those of {known}.")
        link = Link.of(self.alpha, self.share * bits_per_second)
        compute = replace(setting.compute, seconds_per_byte=self.seconds_per_byte).scaled(factor)
        return predict(replace(setting, compute=compute), Network(ranks, 1, link, link))


def fitted(observations: Sequence[Observation], rounds: int = 4) -> Fit:
    """Least squares of relative errors, one unknown after the other.

    Args:
        observations: of each group and number of ranks at least one.
        rounds: over all unknowns.

    Raises:
        ValueError: fewer than two links, from which no rate can be told.
    """
    if len({one.bits_per_second for one in observations}) < 2:
        raise ValueError("fit: expected steps on at least 2 links, got fewer. Measure a slower one, too.")
    best = _with_factors(Fit(1e-4, 0.95, 1e-9, {}), observations)
    for _ in range(rounds):
        for name, (low, high) in (("share", _SHARE), ("alpha", _ALPHA), ("seconds_per_byte", _PER_BYTE)):

            def error(value: float, name: str = name, start: Fit = best) -> float:
                return _error(_with_factors(replace(start, **{name: value}), observations), observations)  # type: ignore[arg-type]

            value = _least(error, low, high)
            tried = _with_factors(replace(best, **{name: value}), observations)  # type: ignore[arg-type]
            if _error(tried, observations) < _error(best, observations):
                best = tried
    return best


def _with_factors(fit: Fit, observations: Sequence[Observation]) -> Fit:
    """The same link with the factors that suit it best."""
    factors = {}
    for key in dict.fromkeys((one.group, one.ranks) for one in observations):
        rows = [one for one in observations if (one.group, one.ranks) == key]

        def error(factor: float, key: tuple[str, int] = key, rows: list[Observation] = rows) -> float:
            return _error(replace(fit, factors={key: factor}), rows)

        factors[key] = _least(error, *_FACTOR)
    return replace(fit, factors=factors)


def _error(fit: Fit, observations: Sequence[Observation]) -> float:
    steps = ((fit.predict(one.setting, one.group, one.ranks, one.bits_per_second).step, one) for one in observations)
    return sum(math.log(step / one.seconds) ** 2 for step, one in steps)


def _least(error: Callable[[float], float], low: float, high: float, evaluations: int = 22) -> float:
    """Golden section over the logarithm of one positive unknown."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    c, d = b - golden * (b - a), a + golden * (b - a)
    at_c, at_d = error(math.exp(c)), error(math.exp(d))
    for _ in range(evaluations):
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - golden * (b - a)
            at_c = error(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + golden * (b - a)
            at_d = error(math.exp(d))
    return math.exp((a + b) / 2)
