"""Scores: one float32 per unit, higher = keep (when dropping) or grow (when growing). A function of a view."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsam.sparse.views import LayerView

__all__ = ["Score", "gradient", "magnitude", "needs_gradient", "random", "reads_gradient"]

Score = Callable[[LayerView], torch.Tensor]


def needs_gradient(score: Score) -> Score:
    """Declares that a score reads `view.growth`: decorate yours with it, and update steps will bring the gradient."""
    score.needs_gradient = True  # type: ignore[attr-defined]
    return score


def reads_gradient(score: Score) -> bool:
    """Whether a score declares that it reads `view.growth`."""
    return bool(getattr(score, "needs_gradient", False))


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


def random(view: LayerView) -> torch.Tensor:
    """Uniform random numbers of (seed, step, layer): what SET grows by."""
    return view.random("score")
