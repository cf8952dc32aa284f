"""The part that recomputes activations in the backward instead of keeping them: less memory, one more forward."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sparsam.memory.nested import tensors_in
from sparsam.memory.segments import Segment
from sparsam.memory.selective import kept_operators
from sparsam.select import select
from sparsam.session import Part, Session

__all__ = ["Recompute"]


class Recompute(Part):
    """Keeps activations at every k-th layer, and computes those between again when the backward needs them.

    Layers that feed each other form segments of `every`; of each only the inputs are kept, and in the backward it runs
    forward once more. With n layers that take b bytes in and save a bytes each, activations are at their peak
    b n / k + a k, least at k = sqrt(n b / a), instead of a n, for at most one forward more. Where a layer saves much
    more than it takes in, as transformer blocks do (a / b about 8), that is every=1. A tensor that comes from
    elsewhere (a mask, what the loop computed between two layers) is kept; a layer fed by nothing of the one before
    begins a segment.

    Losses and gradients are those without it, bit for bit on one machine: random numbers of torch's generators and of
    generators that layers hold, autocast, training modes and buffers are what they were in the forward. Buffers
    (running statistics, ranges of observers) move once a batch. Hooks on modules inside a layer run twice: let those
    that count ask `recomputing`. Python's and NumPy's random numbers are not repeated; a recomputation that saves other
    tensors, or finds changed weights, is refused. Without gradients, in an evaluation, layers run as they are.

    The layers stay the objects that they were, with their parameters, names and hooks; only their class changes while
    attached. Give it after a `Precision` with a policy where layers are nn.Linear themselves. Under torch.compile each
    layer is a checkpoint of its own.

    Args:
        every: k, layers in a segment; 1 with FSDP2, where only one layer's weights are whole.
        selective: keep results of matrix products (blocks too), attention, convolution and top-k; all else is
            recomputed.
        layers: globs over names of modules; None finds the repeated blocks: children of one class in an nn.ModuleList
            or nn.Sequential, the outermost that are called, themselves made of modules.

    Attributes:
        recomputing: whether a recomputation is under way.
        layers: names of the layers, once attached.

    Raises:
        ValueError: fewer than one layer; when attached: no such layers, one inside another, a compiled model or layer,
            a list that is never called, a second part of this kind, more than one layer of FSDP2 in a segment.

    Source: Chen et al. 2016, arXiv:1604.06174 (segments); Korthikanti et al. 2022, arXiv:2205.05198 (selective).
    """

    def __init__(self, every: int = 5, selective: bool = False, layers: Sequence[str] | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected a number of layers of at least 1, got {every!r}.")
        if isinstance(layers, str):
            raise ValueError(f"layers: expected a list of globs, got the string {layers!r}. Write [{layers!r}].")
        self.every, self.selective, self._globs = every, selective, layers
        self.layers: tuple[str, ...] = ()
        self.recomputing = False
        self._operators = kept_operators() if selective else frozenset()
        self._names: dict[nn.Module, str] = {}
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        self._last: weakref.ref[Segment] | None = None

    def attach(self, session: Session) -> None:
        if sum(isinstance(part, Recompute) for part in session.parts) > 1:
            raise ValueError("Recompute: expected one in a session, got several. Name all layers in one.")
        model = session.model.module if isinstance(session.model, DistributedDataParallel) else session.model
        names = _blocks(model) if self._globs is None else _named(model, self._globs)
        # one layer under several names is recomputed as one, wherever it is called
        first: dict[nn.Module, str] = {}
        for name in names:
            first.setdefault(model.get_submodule(name), name)
        layers = {name: layer for layer, name in first.items()}
        if not layers:
            raise ValueError(
                "Recompute: expected repeated blocks (modules of one class in an nn.ModuleList or nn.Sequential), got "
                f"none in {type(model).__name__}. Name the layers: Recompute(layers=[...])."
            )
        self._refuse(model, layers)
        made: dict[type[nn.Module], type[nn.Module]] = {}
        for name, layer in layers.items():
            kind = type(layer)
            self._names[layer], self._classes[layer] = name, kind
            layer.__class__ = made.setdefault(kind, _recomputed(kind, self))
        self.layers = tuple(layers)

    def detach(self) -> None:
        for layer, kind in self._classes.items():
            if type(layer).__bases__ == (kind,):
                layer.__class__ = kind
        # a class that others have built upon stays, and does nothing for a layer that is not known
        self._names, self._classes, self.layers, self._last = {}, {}, (), None

    def _refuse(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        for name, layer in layers.items():
            inner = next((other for other in layers if other.startswith(f"{name}.")), None)
            if inner is not None:
                raise ValueError(
                    f"{inner}: expected layers beside each other, got one inside {name}. Name one of them."
                )
            if type(layer).forward is nn.Module.forward:
                raise ValueError(
                    f"{name}: expected a layer that is called, got a {type(layer).__name__}, which is not. "
                    "Name the layers in it."
                )
            if "forward" in vars(layer):
                raise ValueError(
                    f"{name}: expected the forward of its class, got one of its own, set by other code. "
                    "Leave it out of Recompute(layers=)."
                )
            if self.every > 1 and _is_sharded(layer):
                raise ValueError(
                    f"{name}: expected every=1 with layers under fully_shard, got every={self.every}: the other "
                    "layers of a segment are not gathered when it is recomputed."
                )
        for name, module in model.named_modules():
            if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
                raise ValueError(
                    f"Recompute: expected a model that is not compiled, got {name or 'one that is'}. "
                    "Build the session first, then torch.compile the model."
                )

    def _call(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A layer's forward, in a segment."""
        name = self._names.get(layer)
        if name is None or self.recomputing or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        segment = None if self._last is None else self._last()
        self._last = None  # of a layer that raises nothing goes on
        if segment is None or len(segment) >= self.every or not segment.feeds(tensors_in((args, kwargs))):
            segment = Segment(self._operators, self._recomputing)
        output = segment.call(name, layer, forward, args, kwargs)
        self._last = weakref.ref(segment)
        return output

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False


def _recomputed(kind: type[nn.Module], part: Recompute) -> type[nn.Module]:
    """The class that a layer has while attached."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _compiled(part, kind, self, args, kwargs)
        return part._call(self, functools.partial(kind.forward, self), args, kwargs)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def _compiled(
    part: Recompute, kind: type[nn.Module], layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The same for the compiler, which knows torch's own checkpoints."""
    forward = functools.partial(kind.forward, layer)
    if not part._operators:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(part._operators))
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _named(model: nn.Module, globs: Sequence[str]) -> list[str]:
    return select([name for name, _ in model.named_modules() if name], globs)


def _blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks of a model, the outermost."""
    found: list[str] = []
    for name, module in model.named_modules():
        children = list(module._modules.items())
        alike = len({type(child) for _, child in children}) == 1 and len(children) > 1
        # a list of layers is not called itself
        made = all(
            child is not None and child._modules and type(child).forward is not nn.Module.forward
            for _, child in children
        )
        inside = any(f"{name}.".startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and made and not inside:
            found += [f"{name}.{child}".lstrip(".") for child, _ in children]
    return found


def _is_sharded(layer: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(layer, FSDPModule)
