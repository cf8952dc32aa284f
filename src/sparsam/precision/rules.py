"""Fixed formats by glob over names of products, and what stays high unless a rule says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from sparsam.kernels.formats import BF16, ProductFormat, product_format
from sparsam.precision.policies import Policy, UnitState
from sparsam.select import nearest

__all__ = ["ATTENTION_OUTPUTS", "Rules", "attention_outputs", "by_name", "head_of"]

# Globs over "." + name of a layer; a layer called `out` beside a `qkv` is one too.
ATTENTION_OUTPUTS = (
    "*.out_proj",
    "*.o_proj",
    "*attn.c_proj",
    "*attention.c_proj",
    "*attn.proj",
    "*attention.output.dense",
)


class Rules(Policy):
    """Every product has the format that its name asks for, from the first step to the last.

    Without rules, products run in `low`, outputs of attention in no less than 16 bits, and the head, which is the last
    linear layer of the model, in `head`.

    Args:
        rules: glob -> format. A glob without "/" is about all three products of the layers that it matches, one with
            "/" about products: "*.mlp.*" and "*/weight_gradient". Later ones win over earlier ones and over defaults.
        low: format of products that nothing else is said of.
        head: format of the head's products.

    Raises:
        ValueError: no format has such a name; in `start`, a rule matches nothing.

    Source: what stays high: SwitchBack, Wortsman et al. 2023, arXiv:2304.13013; Peng et al. 2023, arXiv:2310.18313.
    """

    def __init__(
        self,
        rules: Mapping[str, str | ProductFormat] | None = None,
        low: str | ProductFormat = "bf16",
        head: str | ProductFormat = "fp32",
    ) -> None:
        self.rules = {glob: by_name(format) for glob, format in (rules or {}).items()}
        self.low, self.head = by_name(low), by_name(head)

    @property
    def lowest(self) -> tuple[ProductFormat, ...]:
        """All formats that it names, the lowest first."""
        named = dict.fromkeys((self.low, self.head, *self.rules.values()))
        return tuple(sorted(named, key=lambda one: one.bits))

    def start(self, units: tuple[str, ...]) -> Mapping[str, UnitState]:
        named = self.named(units)
        return {unit: UnitState(named.get(unit, self.low).name) for unit in units}

    def named(self, units: tuple[str, ...]) -> dict[str, ProductFormat]:
        """Units that a default or a rule is about, with their formats; all others are in `low`.

        Raises:
            ValueError: a rule matches no unit.
        """
        layers = list(dict.fromkeys(_layer(unit) for unit in units))
        high = self.low if self.low.bits >= BF16.bits else BF16
        defaults = dict.fromkeys(attention_outputs(layers), high)
        if layers:
            defaults[head_of(layers)] = self.head
        found = {unit: defaults[_layer(unit)] for unit in units if _layer(unit) in defaults}
        for glob, format in self.rules.items():
            about_products = "/" in glob
            meant = [unit for unit in units if fnmatchcase(unit if about_products else _layer(unit), glob)]
            if not meant:
                names = list(units) if about_products else layers
                what = "product" if about_products else "layer"
                raise ValueError(f"rules: {glob!r} matches no {what}. {nearest(glob, names)}")
            found |= dict.fromkeys(meant, format)
        return {unit: found[unit] for unit in units if unit in found}


def by_name(format: str | ProductFormat) -> ProductFormat:
    """A format, or the one of this name."""
    return product_format(format) if isinstance(format, str) else format


def attention_outputs(layers: list[str]) -> list[str]:
    """The layers that attention's output goes through."""
    return [
        layer
        for layer in layers
        if any(fnmatchcase(f".{layer}", glob) for glob in ATTENTION_OUTPUTS)
        or (layer.split(".")[-1] == "out" and f"{layer.removesuffix('out')}qkv" in layers)
    ]


def head_of(layers: list[str]) -> str:
    """The head: the last linear layer in the order of the model."""
    return layers[-1]


def _layer(unit: str) -> str:
    return unit.rpartition("/")[0]
