"""The parts that a recipe attaches to a training."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparsam.measure.device_profile import DeviceProfile
from sparsam.precision.part import Precision
from sparsam.rate import LearningRate
from sparsam.recipe.sections import Recipe
from sparsam.session import Part
from sparsam.sparse.part import SparseTraining
from sparsam.sparse.published import static
from sparsam.sparse.table import SparsityTable

__all__ = ["parts_of", "settled_state"]

Probe = Callable[[], Tensor]


def parts_of(
    recipe: Recipe, table: SparsityTable | None, log: Part, ended: bool, measured: DeviceProfile, probe: Probe
) -> list[Part]:
    """The parts of a training, in the order in which they act.

    Args:
        recipe: what to do.
        table: how the model's layers are stored.
        log: what notes rewires.
        ended: whether the method of a gradual recipe has come to its end, and its last topology stays.
        measured: what a policy of formats takes their times from.
        probe: losses on the same data each time, by which it tries formats.
    """
    section, factor = recipe.sparsity, 1.0
    parts = _precision(recipe, measured, probe)
    sparse = table is not None and any(row.storage != "dense" for row in table.rows)
    if section is not None and sparse:
        if ended:
            parts.insert(0, SparseTraining(static()))
        else:
            method = section.build_method(recipe.training.steps)
            parts.insert(0, SparseTraining(method, keep_moments=section.keep_moments))
        if section.l1 is not None:
            # after growth scores were taken, which are about the loss alone
            parts.insert(1, section.l1.build(recipe.training.steps, section.pattern.build()))
        factor = section.lr_factor
    memory = [] if recipe.memory is None else recipe.memory.parts()
    return [*parts, log, LearningRate(recipe.rate(sparse), factor), *memory]


def _precision(recipe: Recipe, measured: DeviceProfile, probe: Probe) -> list[Part]:
    section = recipe.precision
    if isinstance(section, str):
        return [Precision(section)]
    policy = section.policy(recipe.training.steps, recipe.optimizer.warm_up)
    return [Precision(policy, simulate=section.simulate, probe=probe, profile=measured), *section.scaler()]


def settled_state(state: dict[str, object]) -> dict[str, object]:
    """State of a sparse training whose method has ended, without what only the method needed."""
    return state | {"accumulators": {}, "hidden": {}, "retained": {}}
