"""A cluster as a person describes it: a YAML file, or one line that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from sparsam.plan.network import Link, Network
from sparsam.strict_yaml import Loader, Strict, explained, kind_of, one_line

__all__ = ["Cluster", "Device", "Power", "read_cluster"]


class Measured(Strict):
    """Times of ring all-reduces of at least four sizes; the link is fitted to them."""

    ranks: int = Field(ge=2)
    bytes: list[int] = Field(min_length=4)
    seconds: list[float] = Field(min_length=4)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.bytes) != len(self.seconds):
            raise ValueError(f"expected a time for each size, got {len(self.bytes)} and {len(self.seconds)}")
        if min(self.bytes) < 1 or min(self.seconds) <= 0 or len(set(self.bytes)) < 4:
            raise ValueError("expected four different sizes of at least a byte and times above 0")
        return self


class LinkSection(Strict):
    """A link by its latency and rate, or by what was measured on it."""

    alpha_seconds: float | None = Field(None, ge=0)
    bits_per_second: float | None = Field(None, gt=0)
    measured: Measured | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        stated = (self.alpha_seconds is not None) + (self.bits_per_second is not None)
        if stated != (0 if self.measured else 2):
            raise ValueError("expected alpha_seconds and bits_per_second, or measured, not a mixture")
        return self

    def build(self) -> Link:
        if self.measured is not None:
            return Link.fitted(self.measured.ranks, self.measured.bytes, self.measured.seconds)
        assert self.alpha_seconds is not None
        assert self.bits_per_second is not None
        return Link.of(self.alpha_seconds, self.bits_per_second)


class Links(Strict):
    """Inside a node: of each rank. Between nodes: of a node, shared by its ranks."""

    inside: LinkSection | None = None
    between: LinkSection | None = None


class Device(Strict):
    """What one rank computes with, where it is not this machine.

    Attributes:
        flops_per_second: of dense products as training really reaches it.
        sparse_flops_per_second: of block-sparse products, counting active blocks only; None: as dense ones.
        memory_bytes_per_second: what the optimiser, codecs and copies are bound by.
    """

    flops_per_second: float = Field(gt=0)
    sparse_flops_per_second: float | None = Field(None, gt=0)
    memory_bytes_per_second: float = Field(gt=0)


AnyDevice = Annotated[
    Annotated[Literal["measured here"], Tag("named")] | Annotated[Device, Tag("stated")],
    Discriminator(lambda value: "named" if isinstance(value, str) else "stated"),
]


class Power(Strict):
    """Electricity that is paid for beside the price per hour."""

    watts: float = Field(ge=0)
    price_per_kwh: float = Field(ge=0)


class Cluster(Strict):
    """Nodes, ranks, links, prices. Prices and watts are for one rank.

    Attributes:
        collectives: whose: gloo passes messages around a ring, NCCL down trees.
        slowest: how many times longer than the others the slowest rank computes.
        jitter: spread (standard deviation) of one rank's step, as a share of it.
    """

    version: Literal[1]
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    device: AnyDevice
    memory_gib: float = Field(gt=0)
    links: Links = Links()
    collectives: Literal["gloo", "nccl"] = "gloo"
    price_per_hour: float | None = Field(None, ge=0)
    power: Power | None = None
    slowest: float = Field(1.0, ge=1)
    jitter: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _is_connected(self) -> Self:
        if self.nodes > 1 and self.links.between is None:
            raise ValueError(f"links.between: expected the link between {self.nodes} nodes, got none")
        if self.ranks_per_node > 1 and self.links.inside is None:
            raise ValueError(f"links.inside: expected the link between {self.ranks_per_node} ranks of a node, got none")
        return self

    @property
    def network(self) -> Network:
        """Where there is only one kind of link, both are of that kind; where there is none, both cost nothing."""
        inside, between = self.links.inside, self.links.between
        known = inside or between
        if known is None:
            return Network(1, 1, Link(0.0, 0.0), Link(0.0, 0.0))
        links = (inside or known).build(), (between or known).build()
        return Network(self.nodes, self.ranks_per_node, *links, trees=self.collectives == "nccl")

    @property
    def price_per_rank_second(self) -> float | None:
        """In the file's own currency; None where the file names no price."""
        if self.price_per_hour is None and self.power is None:
            return None
        power = 0.0 if self.power is None else self.power.watts / 1000 * self.power.price_per_kwh
        return ((self.price_per_hour or 0.0) + power) / 3600


def read_cluster(path: Path) -> Cluster:
    """Reads and checks the description of a cluster.

    Raises:
        ValueError: it cannot be read or something in it is refused; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: expected the description of a cluster (a YAML file), found nothing there. Check the path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a cluster (a YAML file), it cannot be read ({one_line(error)}).") from error
    try:
        values = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: expected YAML, it does not parse: {one_line(error)}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name}: expected keys like `nodes: 4`, got {kind_of(values)}.")
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        problems = explained(error, Cluster, tags=("named", "stated"))
        raise ValueError(f"{path.name}: {problems}.".replace("?.", "?")) from error
