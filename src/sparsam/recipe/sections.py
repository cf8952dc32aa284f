"""The sections of a recipe: what can be said of a run, and what each section builds, one to one.

What does not go together is refused here, before any data is read. Every default is a default of `sparsam train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from torch import nn

from sparsam.measure.device_profile import DeviceProfile
from sparsam.schedules import Schedule, cosine, warm_up
from sparsam.sparse import published
from sparsam.sparse.allocation import erdos_renyi, uniform
from sparsam.sparse.methods import Method
from sparsam.sparse.patterns import Block, Pattern, Unstructured
from sparsam.sparse.sparsify import inspect, sparsify
from sparsam.sparse.table import SparsityTable
from sparsam.tasks import language
from sparsam.tasks.gpt import GPT
from sparsam.tasks.huggingface import FolderModel

__all__ = [
    "ALL_SLOW",
    "TAGS",
    "VERSION",
    "AdamW",
    "BlockPattern",
    "Data",
    "GPTModel",
    "Recipe",
    "Rewiring",
    "Sparsity",
    "Static",
    "TrainingSection",
    "UnstructuredPattern",
    "all_slow",
]

VERSION = 1
ALL_SLOW = (
    "no layer is faster in blocks on this machine: all left dense; sparsity.if_slow: compact trains sparse all the same"
)

# Optimisers that look at the shape of a weight or mix entries far apart: on blocks they would compute something else.
_SHAPE_READING = {"muon", "adafactor", "shampoo", "soap", "adamw8bit", "adam8bit"}


class Strict(BaseModel):
    """A section: no unknown keys, no silent conversions, no changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Typed(Strict):
    """A section that says of which type it is, in upper or lower case as its name is usually written."""

    @field_validator("type", mode="before", check_fields=False)
    @classmethod
    def _in_any_case(cls, given: object) -> object:
        return _lower(given)


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


class BlockPattern(Typed):
    """Whole blocks of weights live and die together."""

    type: Literal["block"] = "block"
    rows: int = Field(32, ge=1, le=256)
    cols: int = Field(32, ge=1, le=256)

    @property
    def text(self) -> str:
        return f"blocks of {self.rows} × {self.cols}"

    def build(self) -> Pattern:
        return Block(self.rows, self.cols)


class UnstructuredPattern(Typed):
    """Single weights live and die. Fewer FLOPs on paper, the same time."""

    type: Literal["unstructured"] = "unstructured"

    @property
    def text(self) -> str:
        return "single weights"

    def build(self) -> Pattern:
        return Unstructured()


class Static(Typed):
    """The first topology is kept."""

    type: Literal["static"] = "static"

    def text(self, steps: int) -> str:
        return "the first topology stays"

    def build(self, steps: int) -> Method:
        return published.static()


class Rewiring(Typed):
    """SET (grows at random) or RigL (grows where the dense gradient is large)."""

    type: Literal["set", "rigl"] = "rigl"
    every: int = Field(100, ge=1)
    fraction: float = Field(0.3, gt=0, le=1)
    until: float = Field(0.75, gt=0, le=1)

    def text(self, steps: int) -> str:
        name = "RigL" if self.type == "rigl" else "SET"
        return f"{name} every {self.every} steps until step {self._last(steps)}"

    def build(self, steps: int) -> Method:
        """The method for a training of so many steps; `until` is a share of them."""
        make = published.rigl if self.type == "rigl" else published.set_
        return make(self.every, self.fraction, self._last(steps))

    def _last(self, steps: int) -> int:
        return max(1, int(self.until * steps))


def _typed(default: str) -> Discriminator:
    """Chooses between sections by their `type:`, or by the default where none is given."""
    return Discriminator(
        lambda value: _lower(value.get("type", default)) if isinstance(value, dict) else getattr(value, "type", default)
    )


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


AnyPattern = Annotated[
    Annotated[BlockPattern, Tag("block")] | Annotated[UnstructuredPattern, Tag("unstructured")], _typed("block")
]
AnyMethod = Annotated[
    Annotated[Static, Tag("static")] | Annotated[Rewiring, Tag("set")] | Annotated[Rewiring, Tag("rigl")],
    _typed("rigl"),
]
AnyModel = Annotated[
    Annotated[GPTModel, Tag("gpt")] | Annotated[str, Tag("folder")],
    Discriminator(lambda value: "folder" if isinstance(value, str) else "gpt"),
]
TAGS = {"block", "unstructured", "static", "set", "rigl", "gpt", "folder"}


class Sparsity(Strict):
    """What is made sparse, how much, and how it changes."""

    pattern: AnyPattern = BlockPattern()
    density: float = Field(0.1, gt=0, le=1)
    method: AnyMethod = Rewiring()
    allocation: Literal["uniform", "erdos_renyi"] = "uniform"
    storage: Literal["auto", "compact", "masked"] = "auto"
    if_slow: Literal["dense", "scatter", "compact"] = "dense"
    include: list[str] = ["*"]
    exclude: list[str] = []
    sparse_fan_in: bool | None = None  # None: for models that are not trained yet
    lr_factor: float = Field(1.0, gt=0, le=2)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if isinstance(self.pattern, UnstructuredPattern) and self.storage == "compact":
            raise ValueError(
                "storage compact needs pattern block, got unstructured; use storage masked or pattern block"
            )
        if self.density == 1 and isinstance(self.method, Rewiring):
            raise ValueError(
                f"method {self.method.type} has nothing to move at density 1; use method static or a lower density"
            )
        return self

    def apply(self, model: nn.Module, profile: DeviceProfile, recipe: Recipe) -> SparsityTable:
        """Makes the model sparse as this section of `recipe` says; the table of what was done.

        A table of dense layers alone is the answer where every eligible layer measures slower in blocks.

        Raises:
            ValueError: no layer is eligible, for another reason than its speed.
        """
        found = self.inspect(model, profile, recipe)
        if all_slow(found):
            return found
        fan_in = not recipe.starts_trained if self.sparse_fan_in is None else self.sparse_fan_in
        pattern, options = self.pattern.build(), self._options(profile, recipe)
        return sparsify(model, pattern, self.density, sparse_fan_in=fan_in, **options)

    def inspect(self, model: nn.Module, profile: DeviceProfile, recipe: Recipe) -> SparsityTable:
        """The table that `apply` would give; the model stays as it is."""
        return inspect(model, self.pattern.build(), self.density, **self._options(profile, recipe))

    def _options(self, profile: DeviceProfile, recipe: Recipe) -> dict[str, Any]:
        training = recipe.training
        return {
            "include": self.include,
            "exclude": self.exclude,
            "allocation": uniform if self.allocation == "uniform" else erdos_renyi,
            "storage": self.storage,
            "profile": profile,
            "tokens": training.batch * training.context,
            "format": recipe.precision,
            "if_slow": self.if_slow,
            "seed": training.seed,
        }


def all_slow(table: SparsityTable) -> bool:
    """Whether no layer is sparse, and some are dense only because their blocks measured slower."""
    timed = any(row.compact_ms is not None and row.dense_ms is not None for row in table.rows)
    return timed and all(row.storage == "dense" for row in table.rows)


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


class Recipe(Strict):
    """All of a run."""

    version: Literal[1]
    model: AnyModel = GPTModel()
    data: Data = Data()
    sparsity: Sparsity | None = Sparsity()
    optimizer: AdamW = AdamW()
    precision: Literal["bf16", "fp32"] = "bf16"
    training: TrainingSection = TrainingSection()
    twin: Literal["none", "sampled", "full"] = "full"

    @field_validator("precision", mode="before")
    @classmethod
    def _trains_in(cls, precision: object) -> object:
        if precision in ("fp16", "fp8"):
            raise ValueError(f"Sparsam does not train in {precision} yet; the usable precisions are bf16 and fp32")
        return precision

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.sparsity is None and self.twin != "none":
            raise ValueError(f"twin {self.twin} needs sparsity, a dense run has no twin; set twin: none")
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

    @property
    def starts_trained(self) -> bool:
        """Whether the model's weights come from a training before this one."""
        return isinstance(self.model, str)

    def dense(self) -> Recipe:
        """The recipe of the dense twin: the same in everything but sparsity."""
        return self.model_copy(update={"sparsity": None, "twin": "none"})

    def resolved(self) -> Recipe:
        """The same with absolute paths, so that a run can be taken up again from anywhere."""
        data = self.data
        if data.path is not None:
            data = data.model_copy(update={"path": str(Path(data.path).expanduser().resolve())})
        model = str(Path(self.model).expanduser().resolve()) if isinstance(self.model, str) else self.model
        return self.model_copy(update={"data": data, "model": model})

    def yaml(self) -> str:
        """The recipe with every value written out, as `read_recipe` reads it."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)
