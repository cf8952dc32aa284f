"""The policy that lowers slowly and raises at once, by what is measured. Measures nothing itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sparsam.kernels.formats import BF16, FP32, INT8, ProductFormat
from sparsam.precision.policies import Evidence, Policy, UnitState
from sparsam.precision.stats import ProductSample

__all__ = ["Adaptive", "fault", "unclean"]

# What raises a unit. Lowering asks for about half of it, so that statistics near a threshold do not switch to and fro.
MOST_UNDERFLOW, CLEAN_UNDERFLOW = 0.20, 0.10
MOST_SATURATION, CLEAN_SATURATION = 0.001, 0.0005
LEAST_COSINE, CLEAN_COSINE = 0.99, 0.995  # of gradients, and a forward product must not be worse
CLEAN_FORWARD_COSINE = 0.999  # Gaussian data show 0.9993 in fp8, 0.9999 in int8; gradients may be noisier than outputs
CLEAN_ERROR = 4  # times the error of Gaussian data
CUT_SAMPLES = 2  # in a row


@dataclass(frozen=True)
class Adaptive(Policy):
    """Starts high and lowers a product where it is clean, measurably faster, and no worse in loss.

    A unit is lowered to the first candidate that is faster, once `clean_samples` samples in a row were clean and, where
    the loop can compute a loss, a probe on the same batches allows all units that are to be lowered together; if not,
    halves are tried, so that the innocent go down. Without a probe nothing goes below 16 bits. A loss tells of forward
    products alone; gradients go by their samples.

    A unit is raised at once, to the format it came from, when its sample shows a `fault`; all below 16 bits when the
    step was not finite; those lowered within `trial_steps` when the loss leaps. Each raise doubles the wait before the
    next try, and after `most_backoffs` the unit is pinned. Raising is never refused, so evidence that stays bad leads
    to the initial format. A candidate that is not taken is noted in the unit's state with the reason.

    Args:
        initial: format of all units at first; at least 16 bits.
        candidates: lower formats, from high to low bits.
        sample_every: applied steps between samples.
        clean_samples: in a row before a unit is lowered.
        min_gain: time now over time in the candidate, casts included, at least.
        max_gap: upper 95 % bound of the relative gap in loss, at most.
        most_probes: probes in one decision; those left open are tried again after half a wait.
        cool_down: steps of a unit's first wait.
        most_backoffs: raises before a unit is pinned.
        trial_steps: how long after it was lowered a unit may be blamed for a leap of the loss.
        spike: standard deviations above the running mean of the loss that are a leap.
        cooldown_at: applied step from which forward products run in at least 16 bits and nothing is lowered any more;
            before the learning rate's last decay.

    Raises:
        ValueError: an argument is out of range, or candidates are not in order; in `decide`, the state names a format
            that is none of these.
    """

    initial: ProductFormat = FP32
    candidates: tuple[ProductFormat, ...] = (BF16, INT8)
    sample_every: int = 32
    clean_samples: int = 3
    min_gain: float = 1.05
    max_gap: float = 0.0025
    most_probes: int = 12
    cool_down: int = 256
    most_backoffs: int = 4
    trial_steps: int = 128
    spike: float = 6.0
    cooldown_at: int | None = None

    def __post_init__(self) -> None:
        bits = [one.bits for one in self._ladder]
        if self.initial.bits < 16 or not self.candidates or bits != sorted(bits, reverse=True) or bits[0] == bits[1]:
            got = ", ".join(one.name for one in self._ladder)
            raise ValueError(f"Adaptive: expected 16 bits or more and then lower candidates, got {got}. Sort them.")
        for what in ("sample_every", "clean_samples", "most_probes", "cool_down", "most_backoffs"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what}: expected at least 1, got {getattr(self, what)}. See Adaptive for defaults.")
        if not (self.min_gain >= 1 and self.max_gap >= 0 and self.spike > 0 and self.trial_steps >= 0):
            expected = "min_gain >= 1, max_gap >= 0, spike > 0 and trial_steps >= 0"
            got = f"{self.min_gain}, {self.max_gap}, {self.spike} and {self.trial_steps}"
            raise ValueError(f"Adaptive: expected {expected}, got {got}. Correct them.")

    @property
    def lowest(self) -> tuple[ProductFormat, ...]:
        """All formats that a unit may come to, the lowest first."""
        return tuple(reversed(self._ladder))

    @property
    def most_switches(self) -> int:
        """How often one unit's format changes at most, however long the training and whatever the evidence.

        Let B raises pin a unit, and D be the levels of bits below the initial format. Every way up undoes a way down,
        so there were as many of these as of those, and the present depth. After the B-th raise the depth is at most
        D - 1 and nothing is lowered: no more than B + D - 1 ways down, hence as many up. The return at `cooldown_at`
        is one of them.
        """
        levels = len({one.bits for one in self._ladder}) - 1
        return 2 * (self.most_backoffs + levels - 1)

    def start(self, units: tuple[str, ...]) -> Mapping[str, UnitState]:
        return {unit: UnitState(self.initial.name, cool_down=self.cool_down) for unit in units}

    def decide(self, state: Mapping[str, UnitState], evidence: Evidence, step: int) -> Mapping[str, UnitState]:
        """Raises what must be raised; else counts clean samples, and lowers units that have enough.

        Gains are asked for whenever a count begins, so whoever measures them should remember them.
        """
        cooled = self.cooldown_at is not None and step >= self.cooldown_at
        if cooled:
            state = {unit: self._cooled(unit, one) for unit, one in state.items()}
        alarm = not evidence.finite or evidence.loss_score > self.spike
        if not alarm and not evidence.samples:
            return state
        state = {unit: self._watched(unit, one, evidence, step) for unit, one in state.items()}
        if alarm or cooled:
            return state
        counted = {unit: self._counted(unit, one, evidence, step) for unit, one in state.items()}
        return self._lowered(counted, evidence, step)

    def _watched(self, unit: str, one: UnitState, evidence: Evidence, step: int) -> UnitState:
        """Raised if there is a reason."""
        sample = evidence.samples.get(unit, {}).get(one.format)
        below_16 = self._bits(one) < 16
        lately = one.lowered_at is not None and step - one.lowered_at <= self.trial_steps
        if below_16 and not (evidence.finite and (sample is None or sample.finite)):
            return self._raised(one, "not finite", step)
        if lately and evidence.loss_score > self.spike:
            return self._raised(one, f"loss {evidence.loss_score:.1f} deviations above its mean", step)
        if sample is None or not sample.finite:  # 16 bits hold what float32 does, or have a loss scaler
            return one
        one = replace(one, saturated=one.saturated + 1 if sample.saturation > MOST_SATURATION else 0)
        why = fault(sample, one.saturated)
        return self._raised(one, why, step) if why else one

    def _raised(self, one: UnitState, why: str, step: int) -> UnitState:
        """In the format it came from: above it, only what it passed over is in `rejected`."""
        above = [up for up in self._ladder if up.bits > self._bits(one) and up.name not in one.rejected]
        if not above:
            return one
        backoffs = one.backoffs + 1
        rejected = {**one.rejected, one.format: f"raised at step {step}: {why}"}
        one = replace(one, format=min(above, key=lambda up: up.bits).name, backoffs=backoffs, rejected=rejected)
        return self._waiting(replace(one, pinned=backoffs >= self.most_backoffs, lowered_at=None), step)

    def _cooled(self, unit: str, one: UnitState) -> UnitState:
        if not _is_forward(unit) or self._bits(one) >= 16:
            return one
        above = [up for up in self._ladder if up.bits >= 16 and up.name not in one.rejected]
        rejected = {**one.rejected, one.format: f"left at step {self.cooldown_at}, before the last decay"}
        high = min(above, key=lambda up: up.bits).name
        return replace(one, format=high, rejected=rejected, clean=0, saturated=0, lowered_at=None)

    def _counted(self, unit: str, one: UnitState, evidence: Evidence, step: int) -> UnitState:
        """With one more clean sample for the candidate that is next, or none."""
        samples = evidence.samples.get(unit)
        lower = [down for down in self.candidates if down.bits < self._bits(one)]
        if not samples or not lower or one.pinned or step < one.wait:
            return one
        rejected = dict(one.rejected)
        if one.clean == 0:  # a new count, and for what: what does not pay is passed over
            for down in lower:
                if (why := self._does_not_pay(unit, one, down, evidence)) is None:
                    rejected.pop(down.name, None)
                    break
                rejected[down.name] = why
            else:
                return self._waiting(replace(one, rejected=rejected), step)
        candidate = self._next(replace(one, rejected=rejected))
        sample = samples.get(candidate.name)
        if sample is None:
            return one
        if (why := unclean(sample, candidate, _is_forward(unit))) is not None:
            return replace(one, clean=0, rejected={**rejected, candidate.name: why})
        return replace(one, clean=one.clean + 1, rejected=rejected)

    def _does_not_pay(self, unit: str, one: UnitState, candidate: ProductFormat, evidence: Evidence) -> str | None:
        if candidate.bits < 16 and evidence.probe is None:
            return "needs a probe of the loss, and the loop gives none"
        gain = evidence.gain(unit, candidate)
        if gain >= self.min_gain:
            return None
        return "not timed" if math.isnan(gain) else f"{gain:.2f}x of {one.format}'s speed, casts included"

    def _lowered(self, state: dict[str, UnitState], evidence: Evidence, step: int) -> Mapping[str, UnitState]:
        """With all units that have enough clean samples lowered, or told to wait."""
        ready = {
            unit: self._next(one)
            for unit, one in state.items()
            if unit in evidence.samples and one.clean >= self.clean_samples
        }
        failed: Mapping[str, float] = {}
        if evidence.probe is None:
            taken = {unit for unit, down in ready.items() if down.bits >= 16}
        else:
            taken, failed = _innocent(ready, evidence.probe, self.max_gap, self.most_probes)
        for unit, down in ready.items():
            one = state[unit]
            if unit in taken:
                state[unit] = replace(one, format=down.name, clean=0, saturated=0, lowered_at=step)
            elif unit in failed:
                why = f"loss up to {failed[unit]:.2%} higher, {self.max_gap:.2%} allowed"
                state[unit] = self._waiting(replace(one, rejected={**one.rejected, down.name: why}), step)
            elif evidence.probe is not None:
                why = f"left open after {self.most_probes} probes"
                rejected = {**one.rejected, down.name: why}
                state[unit] = replace(one, clean=0, wait=step + self.cool_down // 2, rejected=rejected)
        return state

    def _waiting(self, one: UnitState, step: int) -> UnitState:
        return replace(one, clean=0, saturated=0, wait=step + one.cool_down, cool_down=2 * one.cool_down)

    def _next(self, one: UnitState) -> ProductFormat:
        """What its clean samples are counted for."""
        return next(down for down in self.candidates if down.bits < self._bits(one) and down.name not in one.rejected)

    @property
    def _ladder(self) -> tuple[ProductFormat, ...]:
        return (self.initial, *self.candidates)

    def _bits(self, one: UnitState) -> int:
        for known in self._ladder:
            if known.name == one.format:
                return known.bits
        names = ", ".join(known.name for known in self._ladder)
        raise ValueError(
            f"Adaptive: expected units in {names}, got {one.format}. Resume with the policy it was saved by."
        )


def fault(sample: ProductSample, saturated: int) -> str | None:
    """Why a unit cannot stay in the format that it was sampled in; None if it can.

    Args:
        sample: of finite operands.
        saturated: samples in a row with too many values cut, this one included.
    """
    if sample.underflow > MOST_UNDERFLOW:
        return f"{sample.underflow:.0%} of values become zero"
    if saturated >= CUT_SAMPLES:
        return f"{sample.saturation:.2%} of values cut"
    # written so that NaN is a fault
    return None if sample.cosine >= LEAST_COSINE else f"cosine {sample.cosine:.3f} with the product in float32"


def unclean(sample: ProductSample, candidate: ProductFormat, forward: bool) -> str | None:
    """Why a unit cannot be lowered to the format that it was sampled in; None if it can."""
    # a sample tells of the worse operand, and that of a gradient's product may be in the coarser format
    floor = max(candidate.operand.error_floor, 0.0 if forward else candidate.gradient.error_floor)
    least_cosine = CLEAN_FORWARD_COSINE if forward else CLEAN_COSINE
    if not sample.finite:
        return "values that are not finite"
    if not sample.underflow <= CLEAN_UNDERFLOW:
        return f"{sample.underflow:.0%} of values become zero"
    if not sample.saturation <= CLEAN_SATURATION:
        return f"{sample.saturation:.2%} of values cut"
    if not sample.median_error <= CLEAN_ERROR * floor:
        return f"median error {sample.median_error:.2%}, Gaussian data have {floor:.2%}"
    return None if sample.cosine >= least_cosine else f"cosine {sample.cosine:.4f} with the product in float32"


def _innocent(
    units: Mapping[str, ProductFormat],
    probe: Callable[[Mapping[str, ProductFormat]], float],
    max_gap: float,
    most_probes: int,
) -> tuple[set[str], dict[str, float]]:
    """Units that may be lowered together, and the gap of each that may not; units of neither kind were left open.

    A group that fails is halved. Groups are tried on top of all that passed before, so that what is taken has passed
    as a whole.
    """
    taken: set[str] = set()
    failed: dict[str, float] = {}
    known: dict[frozenset[str], float] = {}  # a half whose sibling passed is the failed group again
    groups = [list(units)] if units else []
    while groups:
        group = groups.pop()
        together = frozenset(taken.union(group))
        if together not in known:
            if len(known) == most_probes:
                break
            known[together] = probe({unit: units[unit] for unit in units if unit in together})
        if known[together] <= max_gap:
            taken.update(group)
        elif len(group) == 1:
            failed[group[0]] = known[together]
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return taken, failed


def _is_forward(unit: str) -> bool:
    return unit.endswith("/forward")
