"""Fits what a description of a cluster leaves open to measured steps: how slow ranks are that share a machine, what of
a link's rate arrives, what messages, bytes and codecs cost. Then it predicts steps that nobody has measured.

Each unknown is a thing of its own: ranks that share a machine compute more slowly, rewires included, and links and
codecs take what they take, however slow the ranks are. Otherwise a wait of one codec would be taken for slow ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsam.comm.codecs import Codec
from sparsam.plan.network import Link, Network
from sparsam.plan.predict import Prediction, Setting, predict

__all__ = ["Fit", "Observation", "fitted"]


@dataclass(frozen=True)
class Observation:
    """One measured step.

    Attributes:
        setting: what was done, with the compute of one rank that has the machine for itself.
        group: settings of one group, of one model, compute at the same speed whatever their codecs.
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
        waits: (codec, ranks) -> seconds that a bucket waits whatever its size, where an exchange has several steps.
    """

    alpha: float
    share: float
    seconds_per_byte: float
    factors: dict[tuple[str, int], float]
    waits: dict[tuple[Codec, int], float]

    def predict(self, setting: Setting, group: str, ranks: int, bits_per_second: float) -> Prediction:
        """The step of a setting. A codec that was never seen on so many ranks waits for nothing.

        Raises:
            ValueError: nothing of its group was measured on so many ranks.
        """
        factor = self.factors.get((group, ranks))
        if factor is None:
            known = ", ".join(f"{name} on {count}" for name, count in self.factors)
            raise ValueError(f"{setting.name}: expected a fit of {group} on {ranks} ranks, got those of {known}.")
        compute = setting.compute.scaled(factor)
        codec = replace(compute.codec, wait=self.waits.get((setting.codec, ranks), 0.0))
        compute = replace(compute, codec=codec, seconds_per_byte=self.seconds_per_byte)
        link = Link.of(self.alpha, self.share * bits_per_second)
        return predict(replace(setting, compute=compute), Network(ranks, 1, link, link))


@dataclass(frozen=True)
class _Unknown:
    """Where the search for one of them begins, its limits, and how firmly it is held there.

    Attributes:
        hold: error of a step, as a share of it, that weighs as much as this being e times what it began with.
    """

    start: float
    low: float
    high: float
    hold: float = 0.003


_ALPHA = _Unknown(1e-4, 1e-6, 3e-2)
_SHARE = _Unknown(0.95, 0.5, 1.0)
_PER_BYTE = _Unknown(1e-9, 1e-11, 1e-7)
_WAIT = _Unknown(1e-3, 1e-6, 1.0)
# where steps do not tell slow ranks from a wait, it is a wait
_FACTOR = _Unknown(1.0, 0.05, 50.0, hold=0.03)


def fitted(observations: Sequence[Observation], rounds: int = 40) -> Fit:
    """Least squares of relative errors, in the logarithms of all unknowns at once.

    Args:
        observations: of each group and number of ranks at least one.
        rounds: steps of the search.

    Raises:
        ValueError: fewer than two links, from which no rate can be told.

    Source: Levenberg 1944, Marquardt 1963 (the search).
    """
    if len({one.bits_per_second for one in observations}) < 2:
        raise ValueError("fit: expected steps on at least 2 links, got fewer. Measure a slower one, too.")
    factors = list(dict.fromkeys((one.group, one.ranks) for one in observations))
    # one all-reduce is what alpha tells of
    waits = list(dict.fromkeys((c, one.ranks) for one in observations if not (c := one.setting.codec).additive))
    unknowns = [_ALPHA, _SHARE, _PER_BYTE, *[_FACTOR] * len(factors), *[_WAIT] * len(waits)]
    low, high, start = (
        torch.tensor([getattr(one, name) for one in unknowns], dtype=torch.float64).log()
        for name in ("low", "high", "start")
    )
    hold = torch.tensor([one.hold for one in unknowns], dtype=torch.float64)

    def fit_of(logs: Tensor) -> Fit:
        alpha, share, per_byte, *others = logs.exp().tolist()
        return Fit(
            alpha,
            share,
            per_byte,
            dict(zip(factors, others[: len(factors)], strict=True)),
            dict(zip(waits, others[len(factors) :], strict=True)),
        )

    def errors(logs: Tensor) -> Tensor:
        fit = fit_of(logs)
        steps = (fit.predict(one.setting, one.group, one.ranks, one.bits_per_second).step for one in observations)
        relative = [math.log(step / one.seconds) for step, one in zip(steps, observations, strict=True)]
        return torch.cat([torch.tensor(relative, dtype=torch.float64), hold * (logs - start)])

    return fit_of(_least_squares(errors, start, low, high, rounds))


def _least_squares(errors: Callable[[Tensor], Tensor], start: Tensor, low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """Where the sum of squares is least, between two limits, near where it begins."""
    best, now, damping = start, errors(start), 1e-2
    slopes = _slopes(errors, best, now, high)
    for _ in range(rounds):
        normal = slopes.T @ slopes
        normal.diagonal().mul_(1 + damping).add_(1e-12)
        tried = torch.clamp(best - torch.linalg.solve(normal, slopes.T @ now), low, high)
        then = errors(tried)
        if then.square().sum() < now.square().sum():
            best, now, damping = tried, then, damping / 4
            slopes = _slopes(errors, best, now, high)
        else:
            damping *= 5
    return best


def _slopes(errors: Callable[[Tensor], Tensor], at: Tensor, now: Tensor, high: Tensor, by: float = 1e-3) -> Tensor:
    """How errors change with each unknown, (errors, unknowns); backwards at its upper limit."""
    columns = []
    for place in range(len(at)):
        moved = at.clone()
        signed = by if at[place] + by <= high[place] else -by
        moved[place] += signed
        columns.append((errors(moved) - now) / signed)
    return torch.stack(columns, 1)
