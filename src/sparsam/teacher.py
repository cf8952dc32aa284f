"""The teacher that a recipe names: read from its folder, held against the student's text, and part of its loss.

A training without one passes through here as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsam import measure
from sparsam.compress.distil import Distillation
from sparsam.recipe import Recipe, read_recipe
from sparsam.stored_model import trained_model
from sparsam.tasks import language
from sparsam.tasks.huggingface import FolderModel

__all__ = ["counted_step", "distillation_of", "loss_of"]

_PASSES = 3  # forward and backward are counted as three forwards, and a teacher has one
# letters, digits, signs and other scripts: tokenisers that agree on it are the same
_PROBE = 'def f(x1):\n    return "Grüße, 世界 " + x1  # 0.5 * HTTPServer\n'.encode()


def distillation_of(recipe: Recipe) -> Distillation | None:
    """Reads the teacher, where the recipe names one; the global random state is left as it was.

    Raises:
        ValueError: its folder holds no trained model, or one that reads other tokens or shorter texts.
        CheckpointError: its checkpoint is damaged.
    """
    section = recipe.distillation
    if section is None:
        return None
    folder = section.folder
    is_run = (folder / "recipe.yaml").is_file()
    if not is_run and not (folder / "config.json").is_file():
        what = "neither" if folder.is_dir() else "nothing there"
        raise ValueError(
            f"distillation.teacher: expected a run folder or a Hugging Face model folder, found {what} in {folder}. "
            "Give the path of one on this machine."
        )
    taught = read_recipe(folder / "recipe.yaml") if is_run else recipe.model_copy(update={"model": str(folder)})
    _check_tokens(folder, taught, recipe)
    longest = taught.training.context if is_run else FolderModel(folder).context
    if longest is not None and longest < recipe.training.context:
        raise ValueError(
            f"{folder}: expected a teacher for {recipe.training.context} tokens, got one for {longest}. "
            f"Set training.context to at most {longest}."
        )
    with torch.random.fork_rng([]):
        found = trained_model(folder, taught) if is_run else (taught.build_model(), 0)
    if found is None:
        raise ValueError(
            f"distillation.teacher: expected a run with a checkpoint, found none in {folder}. Train it first."
        )
    return Distillation(found[0].eval().requires_grad_(False), section.weight, section.temperature)


def loss_of(model: nn.Module, batch: language.Batch, distillation: Distillation | None) -> Tensor:
    """The loss of a batch: `language.loss_of`, and what the student has to learn from its teacher."""
    if distillation is None:
        return language.loss_of(model, batch)
    logits = model(batch.inputs)
    own = functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
    return distillation.loss(logits, batch.inputs, own)


def counted_step(model: nn.Module, batch: Tensor, distillation: Distillation | None) -> measure.StepFlops:
    """Operations of one micro-batch, the teacher's forward among them: it is as much work in the dense twin."""
    own = measure.training_step(model, batch)
    if distillation is None:
        return own
    taught = measure.training_step(distillation.teacher, batch).computed / _PASSES
    return replace(own, dense=own.dense + taught, computed=own.computed + taught, on_paper=own.on_paper + taught)


def _check_tokens(folder: Path, teacher: Recipe, student: Recipe) -> None:
    """Teacher and student must read a text as the same tokens."""
    if teacher.model == student.model:
        return
    read = [
        FolderModel(Path(one.model).expanduser()).tokenise if isinstance(one.model, str) else language.as_bytes
        for one in (teacher, student)
    ]
    if read[0] is not read[1] and read[0](_PROBE).tolist() != read[1](_PROBE).tolist():
        raise ValueError(
            f"{folder}: expected a teacher that reads the student's tokens, got one with another tokenizer. "
            "Choose a teacher of the same vocabulary."
        )
