"""The model of a training as it is stored: which layers are sparse, which have become compact, and by which timings.

Over several ranks rank 0's timings decide for all. Not for what trains the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsam import checkpoint
from sparsam.measure.device_profile import DeviceProfile
from sparsam.ranks import ALONE, Ranks
from sparsam.recipe import ALL_SLOW, Recipe, all_slow
from sparsam.recipe.storage import Products, current, make_compact, restored, settled
from sparsam.replicas import by_timings_of_first
from sparsam.run import Run
from sparsam.sparse.table import SparsityTable

__all__ = ["StoredModel", "trained_model"]


class StoredModel:
    """A model that a recipe makes sparse, or that a checkpoint brings back to where it was.

    Args:
        model: dense, as it was built; changed in place.
        recipe: of the run.
        ranks: that decide alike.
        state: of a checkpoint, or None.
        notify: is told things that a person should know, a line each.

    Attributes:
        table: what was done with each layer; None for a dense recipe.
        compact: the layers that became compact once the method had ended; None before that.
        profile: the timings.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        ranks: Ranks,
        state: Mapping[str, Any] | None,
        notify: Callable[[str], None],
    ) -> None:
        self.model, self.ranks = model, ranks
        then: Mapping[str, Any] = state["run"] if state else {"timed_for": ranks.size}
        self.compact: Products | None = then.get("compact")
        # a resumed run decides by the timings of its beginning, and by the batch that a rank had then
        carried = then.get("profile")
        self.profile = DeviceProfile.from_json(carried) if carried else DeviceProfile()
        self._timed_for = int(then.get("timed_for", 1))
        self._share = recipe.over(self._timed_for)
        self.table: SparsityTable | None = None
        if (sparsity := recipe.sparsity) is not None:
            self.table = by_timings_of_first(
                self.profile, ranks, lambda: sparsity.apply(model, self.profile, self._share)
            )
            if all_slow(self.table):
                notify(ALL_SLOW)
        if state:
            # before there is an optimiser: the state may hold other numbers of blocks
            table, weights = self.table, state["model"]
            self.table = by_timings_of_first(
                self.profile, ranks, lambda: restored(table, model, self.compact, weights, self.profile, self._share)
            )

    def make_compact(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """The method has ended: blocks become compact where that is faster. Returns how many layers did, how many did
        not."""
        table = self.table
        assert table is not None
        were_masked = {row.name for row in table.rows if row.storage == "masked"}
        self.table, self.compact = by_timings_of_first(
            self.profile, self.ranks, lambda: settled(table, self.model, self.profile, self._share)
        )
        make_compact(self.model, self.compact, optimizer)
        became = were_masked & self.compact.keys()
        return {"layers": len(became), "masked": len(were_masked - became)}

    def state_dict(self) -> dict[str, Any]:
        """What the next process needs beside the weights."""
        return {"compact": self.compact, "profile": self.profile.to_json(), "timed_for": self._timed_for}

    def write(self, run: Run) -> None:
        """Writes the table, with the densities of now, and the timings behind it."""
        if self.table is not None:
            self.table = current(self.table, self.model)
            run.write("profile.json", self.profile.to_json())
            run.write("layers.json", self.table.to_json())


def trained_model(folder: Path, recipe: Recipe) -> tuple[nn.Module, int] | None:
    """The model of a run's newest checkpoint and its step, None without one; reads only: a training may be going on.

    Raises:
        CheckpointError: it is damaged.
    """
    folders = sorted((folder / "checkpoints").glob("step-*"))
    if not folders:
        return None
    state = checkpoint.read(folders[-1], groups=("model", "run"))
    model = recipe.build_model()
    StoredModel(model, recipe, ALONE, state, lambda note: None)  # makes its layers, and loads them
    return model.eval(), int(state["run"]["step"])
