"""How density is shared out between layers. An allocation is a function of all layers' shapes and the total density."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["Allocation", "erdos_renyi", "uniform"]

Allocation = Callable[[Mapping[str, tuple[int, ...]], float], dict[str, float]]


def uniform(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """The same density everywhere."""
    return dict.fromkeys(shapes, _checked(density))


def erdos_renyi(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """Erdos-Renyi-Kernel: a layer's density is proportional to (sum of its dims) / (product of its dims).

    Layers that come out above 1 are made dense and the rest is solved again, so the total is met exactly.

    Args:
        shapes: weight shape of each layer.
        density: active share of all weights of these layers, in (0, 1].

    Source: Evci et al. 2020, arXiv:1911.11134, section 3; Mocanu et al. 2018, arXiv:1707.04780.
    """
    _checked(density)
    sizes = {name: _product(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        free = [name for name in shapes if name not in dense]
        if not free:
            return dict.fromkeys(shapes, 1.0)
        budget = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = budget / sum(raw[name] * sizes[name] for name in free)
        over = {name for name in free if scale * raw[name] > 1.0}
        if not over:
            return {name: 1.0 if name in dense else scale * raw[name] for name in shapes}
        dense |= over


def _checked(density: float) -> float:
    if not 0.0 < density <= 1.0:
        raise ValueError(
            f"density: expected a share of active units in (0, 1], got {density}. Sparsity is 1 - density."
        )
    return density


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
