"""Scores: one float32 per unit, higher = keep (when dropping) or grow (when growing). A function of a view.

A score that needs more than weights says so with a decorator: `needs_gradient`, or `accumulates` for what it gathers
over steps. Who trains the model keeps what is gathered; scores and methods hold no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sparsam.sparse.views import LayerView

__all__ = [
    "Accumulator",
    "Score",
    "accumulates",
    "accumulators_of",
    "check_functions",
    "fisher",
    "gradient",
    "magnitude",
    "mest",
    "momentum",
    "movement",
    "needs_gradient",
    "random",
    "reads_gradient",
    "scored",
    "taylor",
]

Score = Callable[[LayerView], torch.Tensor]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Accumulator:
    """One float32 per stored weight, gathered at every step from gradients as they are before clipping.

    Args:
        name: how `view.accumulators` calls it; scores that use the same name share it.
        update: (accumulator, weight, gradient) -> None, writes the accumulator in place.
        instead_of: a moment of the optimiser that serves as well; where there is one, nothing is gathered.
        all_weights: its entries at inactive units mean something, so a score of it can say where to grow. Only masked
            storage has those.
    """

    name: str
    update: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    instead_of: str | None = None
    all_weights: bool = False


def needs_gradient(score: _F) -> _F:
    """Declares that a score reads `view.growth`: decorate yours with it, and update steps will bring the gradient."""
    score.needs_gradient = True  # type: ignore[attr-defined]
    return score


def reads_gradient(score: object) -> bool:
    """Whether a score, or an allocation by one, declares that it reads `view.growth`."""
    return bool(getattr(score, "needs_gradient", False))


def accumulates(*accumulators: Accumulator) -> Callable[[_F], _F]:
    """Declares what a score gathers over steps."""

    def declare(score: _F) -> _F:
        score.accumulators = accumulators  # type: ignore[attr-defined]
        return score

    return declare


def accumulators_of(score: object) -> tuple[Accumulator, ...]:
    """What a score, or an allocation by one, declares that it gathers."""
    found: tuple[Accumulator, ...] = getattr(score, "accumulators", ())
    return found


def check_functions(**given: object) -> None:
    """Refuses a number or a name where a function is meant: updates come late, and errors should not.

    Raises:
        ValueError: names the argument.
    """
    for what, one in given.items():
        if not callable(one):
            advice = "Write constant(...)" if what in ("fraction", "density") else "Pass the function itself"
            raise ValueError(f"{what}: expected a function, got {one!r}. {advice}.")


def scored(score: Score, view: LayerView) -> torch.Tensor:
    """What a score says of a layer, for whoever is given one.

    Raises:
        ValueError: it is not one number for each unit.
    """
    found = score(view)
    if found.shape != view.topology.shape:
        raise ValueError(
            f"{view.name}: expected a score for each of {tuple(view.topology.shape)} units, got {tuple(found.shape)}. "
            "Bring entries to units with view.reduce(...)."
        )
    return found.float()


def magnitude(view: LayerView) -> torch.Tensor:
    """Mean |weight| of each unit.

    Source: Mocanu et al. 2018, arXiv:1707.04780 (what SET drops by).
    """
    return view.reduce(view.weight.float().abs())


@needs_gradient
def gradient(view: LayerView) -> torch.Tensor:
    """Mean |dense gradient| of each unit, active or not. The absolute value is taken after all sums.

    Source: Evci et al. 2020, arXiv:1911.11134 (what RigL grows by).

    Raises:
        ValueError: this step brought no dense gradient.
    """
    if view.growth is None:
        raise ValueError(
            f"{view.name}: expected a dense gradient at step {view.step}, got none. "
            "Run the forward inside session.forward(), and decorate a score of your own with needs_gradient."
        )
    return view.growth


@accumulates(Accumulator("momentum", lambda total, weight, gradient: total.lerp_(gradient, 0.1), all_weights=True))
def momentum(view: LayerView) -> torch.Tensor:
    """Mean |running mean of gradients| of each unit, decay 0.9. To grow by it takes masked storage, which has gradients
    of inactive weights; 4 more bytes a stored weight.

    Source: Dettmers and Zettlemoyer 2019, arXiv:1907.04840 (sparse momentum). Differs: a score; the paper also shares
    out what grows between layers by their mean momentum, which is an allocation's to do.
    """
    return view.reduce(view.accumulators["momentum"].abs())


def taylor(view: LayerView) -> torch.Tensor:
    """Mean |weight * gradient| of each unit: to first order, how much the loss moves without its weights. The gradient
    is that of the last window.

    Source: Molchanov et al. 2019, arXiv:1906.10771. Differs: the mean of absolute values, not a sum of squares.

    Raises:
        ValueError: there was no backward.
    """
    if view.gradient is None:
        raise ValueError(
            f"{view.name}: expected a gradient for the Taylor score, got none. Run a backward before sparsify; in a "
            "loop of your own, call session.after_step() before zero_grad(); or use another score."
        )
    return view.reduce((view.weight.float() * view.gradient.float()).abs())


def mest(view: LayerView) -> torch.Tensor:
    """Mean |weight| + 0.01 |gradient| of each unit: small weights stay where the loss is about to move them.

    Source: Yuan et al. 2021, arXiv:2110.14032 (MEST drops by it). Differs: their factor on the gradient falls.

    Raises:
        ValueError: there was no backward.
    """
    if view.gradient is None:
        raise ValueError(
            f"{view.name}: expected a gradient for the MEST score, got none. In a loop of your own, call "
            "session.after_step() before zero_grad(); or use magnitude."
        )
    return view.reduce(view.weight.float().abs() + 0.01 * view.gradient.float().abs())


@accumulates(
    Accumulator(
        "squared_gradient",
        lambda total, weight, gradient: total.lerp_(gradient.square(), 0.01),
        instead_of="exp_avg_sq",
    )
)
def fisher(view: LayerView) -> torch.Tensor:
    """Mean weight^2 * E[gradient^2] / 2 of each unit: to second order, with the diagonal of the empirical Fisher matrix
    for the Hessian, how much the loss rises without its weights.

    The mean squared gradient is Adam's second moment when there is one, else gathered (decay 0.99, 4 bytes a weight).

    Source: Kurtic et al. 2022, arXiv:2203.07259, eq. 3, with a diagonal Fisher matrix.

    Raises:
        ValueError: no optimiser step was taken yet.
    """
    squares = view.moments.get("exp_avg_sq", view.accumulators.get("squared_gradient"))
    if squares is None:
        raise ValueError(
            f"{view.name}: expected squared gradients for the Fisher score, got none. "
            "They are gathered while training: use it in a method, not in sparsify."
        )
    return view.reduce(view.weight.float().square() * squares.float() / 2)


@accumulates(
    Accumulator("movement", lambda total, weight, gradient: total.addcmul_(weight.float(), gradient, value=-1.0))
)
def movement(view: LayerView) -> torch.Tensor:
    """Mean of -sum over steps of weight * gradient of each unit: whether training moves its weights away from zero.

    Source: Sanh et al. 2020, arXiv:2005.07683 (hard movement pruning). Differs: not scaled by the learning rate, and
    what is inactive gathers nothing, where the paper's straight-through gradient lets it come back.
    """
    return view.reduce(view.accumulators["movement"])


def random(view: LayerView) -> torch.Tensor:
    """Uniform random numbers of (seed, step, layer): what SET grows by."""
    return view.random("score")
