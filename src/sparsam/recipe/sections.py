"""The sections of a recipe: what can be said of a run, and what each section builds, one to one.

What does not go together is refused here, before any data is read. Every default is a default of `sparsam train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import torch
import yaml
from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from torch import nn

from sparsam.recipe.allocations import AnyAllocation
from sparsam.recipe.compression import AnyCodec, CompressionSection
from sparsam.recipe.density import AnyMethod, AnySchedule
from sparsam.recipe.distillation import DistillationSection
from sparsam.recipe.memory import Memory
from sparsam.recipe.patterns import AnyPattern
from sparsam.recipe.precision import AnyPrecision, PolicySection
from sparsam.recipe.section import Strict, Typed
from sparsam.recipe.sparsity import Sparsity
from sparsam.schedules import Schedule, cosine, warm_up
from sparsam.tasks import language
from sparsam.tasks.gpt import GPT
from sparsam.tasks.huggingface import FolderModel

__all__ = ["TAGS", "VERSION", "AdamW", "Data", "GPTModel", "Recipe", "TrainingSection"]

VERSION = 1

# Optimisers that look at the shape of a weight or mix entries far apart: on blocks they would compute something else.
_SHAPE_READING = {"muon", "adafactor", "shampoo", "soap", "adamw8bit", "adam8bit"}


class GPTModel(Strict):
    """The byte-level GPT of `sparsam.tasks.gpt`."""

    layers: int = Field(6, ge=1)
    width: int = Field(512, ge=1)
    heads: int = Field(8, ge=1)
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"] = "gelu"

    @property
    def text(self) -> str:
        layers, heads = (
            f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((self.layers, "layer"), (self.heads, "head"))
        )
        return f"byte-level GPT · {layers}, width {self.width}, {heads}"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"expected heads that divide width, got {self.heads} heads for width {self.width}")
        return self


class Data(Strict):
    """Where the text comes from. No path: Python's own standard library."""

    path: str | None = None
    validation_share: float = Field(0.05, gt=0, lt=0.5)


AnyModel = Annotated[
    Annotated[GPTModel, Tag("gpt")] | Annotated[str, Tag("folder")],
    Discriminator(lambda value: "folder" if isinstance(value, str) else "gpt"),
]
# names that pydantic puts into the place of an error, and that no reader has written
TAGS = frozenset({"gpt", "folder", "format"}).union(
    get_args(annotated)[1].tag
    for union in (AnyPattern, AnyMethod, AnyAllocation, AnySchedule, AnyPrecision, AnyCodec)
    for annotated in get_args(get_args(union)[0])
)


class AdamW(Typed):
    """AdamW with linear warm-up and cosine decay. `warm_up` and `final_lr` are shares: of the steps and of `lr`."""

    type: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    final_lr: float = Field(0.1, ge=0, le=1)
    warm_up: float = Field(0.1, ge=0, lt=1)
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(0.1, ge=0)
    clip: float | None = Field(1.0, gt=0)

    @field_validator("type", mode="before")
    @classmethod
    def _not_shape_reading(cls, given: object) -> object:
        if isinstance(given, str) and given.lower().replace("-", "") in _SHAPE_READING:
            raise ValueError(f"{given} reads the shape of the weights, which blocks do not keep; use adamw")
        return given

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, betas: list[float]) -> list[float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"expected two numbers in [0, 1), got {betas}")
        return betas

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, fused; weight decay on matrices and blocks, not on biases and norms."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.lr, betas=(self.betas[0], self.betas[1]), fused=True
        )

    def schedule(self, steps: int) -> Schedule:
        """The share of `lr` at each step of a training of so many."""
        warm = int(self.warm_up * steps)
        return warm_up(cosine(1.0, self.final_lr, steps=max(1, steps - warm), begin=warm), warm)


class TrainingSection(Strict):
    """How long, how much at once, and how often to look. Steps are applied optimiser steps."""

    steps: int = Field(500, ge=1)
    batch: int = Field(16, ge=1)
    accumulate: int = Field(1, ge=1)
    context: int = Field(256, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)
    threads: int | None = Field(None, ge=1)
    compile: bool = False
    evaluate_every: int = Field(50, ge=1)
    evaluate_windows: int = Field(64, ge=1)
    checkpoint_every: int = Field(200, ge=1)
    timeout_seconds: float = Field(600, gt=0)


class Recipe(Strict):
    """All of a run."""

    version: Literal[1]
    model: AnyModel = GPTModel()
    data: Data = Data()
    sparsity: Sparsity | None = Sparsity()
    optimizer: AdamW = AdamW()
    precision: AnyPrecision = "bf16"
    compression: CompressionSection | None = None
    distillation: DistillationSection | None = None
    memory: Memory | None = None
    training: TrainingSection = TrainingSection()
    twin: Literal["none", "sampled", "full"] = "full"

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.sparsity is None and isinstance(self.precision, str) and self.twin != "none":
            raise ValueError(
                f"twin {self.twin} needs sparsity or a policy of precision, without them a run has no twin; "
                "set twin: none"
            )
        if self.training.compile and isinstance(self.precision, PolicySection) and self.precision.switches:
            raise ValueError(
                f"precision {self.precision.type} compiles anew at every switch of a format; "
                "set training.compile: false, or precision: bf16"
            )
        if self.sparsity is not None:
            try:
                self.sparsity.check(self.training.steps)
            except ValueError as error:
                raise ValueError(f"sparsity: {error}") from error
        return self

    def task(self) -> language.Task:
        """Reads the text, and looks at the model folder where there is one.

        Raises:
            ValueError: text or model are not what the recipe needs; one line.
        """
        path = None if self.data.path is None else Path(self.data.path).expanduser()
        share, context = self.data.validation_share, self.training.context
        if isinstance(self.model, GPTModel):
            return language.Task(language.read_corpus(path, share), self.build_model, self.model.text)
        folder = FolderModel(Path(self.model).expanduser())
        if folder.context is not None and context > folder.context:
            raise ValueError(
                f"{self.model}: expected training.context of at most {folder.context}, got {context}. Set less."
            )
        corpus = language.read_corpus(path, share, folder.tokenise, folder.separator)
        return language.Task(corpus, folder.build_model, folder.folder.resolve().name)

    def build_model(self) -> nn.Module:
        """The dense model, initialised from the global random state or read from its folder."""
        if isinstance(self.model, GPTModel):
            return GPT(**self.model.model_dump(), context=self.training.context)
        return FolderModel(Path(self.model).expanduser()).build_model()

    def rate(self, sparse: bool = True) -> Schedule:
        """The share of `optimizer.lr` at each step, with what the method wants of it where a layer is sparse."""
        steps = self.training.steps
        rate = self.optimizer.schedule(steps)
        if self.sparsity is None or not sparse:
            return rate
        share = self.sparsity.method.rate(steps)
        return lambda step: rate(step) * share(step)

    @property
    def starts_trained(self) -> bool:
        """Whether the model's weights come from a training before this one."""
        return isinstance(self.model, str)

    @property
    def format(self) -> str:
        """The format whose timings decide how layers are stored."""
        return self.precision if isinstance(self.precision, str) else "bf16"

    def dense(self) -> Recipe:
        """The recipe of the dense twin: the same but for sparsity, and in plain bf16 where a policy decides."""
        return self.model_copy(update={"sparsity": None, "twin": "none", "precision": self.format})

    def over(self, ranks: int) -> Recipe:
        """The recipe of each of so many ranks: its own share of every batch.

        Raises:
            ValueError: the batch cannot be shared out, or the recipe asks for what one process does alone.
        """
        batch, rest = divmod(self.training.batch, ranks)
        if ranks == 1:
            return self
        if rest:
            raise ValueError(
                f"training.batch: expected one that {ranks} ranks can share, got {self.training.batch}. "
                "Set another batch, or train on another number of ranks."
            )
        if self.twin != "none":
            raise ValueError(
                f"twin: expected none on {ranks} ranks, got {self.twin}: the dense twin trains in one process. "
                "Add --set twin=none."
            )
        if self.training.compile:
            raise ValueError(
                f"training.compile: expected false on {ranks} ranks, got true. Add --set training.compile=false."
            )
        return self.model_copy(update={"training": self.training.model_copy(update={"batch": batch})})

    def resolved(self) -> Recipe:
        """The same with absolute paths, so that a run can be taken up again from anywhere."""
        data = self.data
        if data.path is not None:
            data = data.model_copy(update={"path": str(Path(data.path).expanduser().resolve())})
        model = str(Path(self.model).expanduser().resolve()) if isinstance(self.model, str) else self.model
        taught = self.distillation and self.distillation.resolved()
        return self.model_copy(update={"data": data, "model": model, "distillation": taught})

    def yaml(self) -> str:
        """The recipe with every value written out, as `read_recipe` reads it."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)
