"""Calls of layers that are recomputed together: what a recomputation starts from, and how it fills the graph again.

Autograd keeps a placeholder for every tensor that a layer saves. The first one that the backward asks for makes the
whole segment compute again, as it did, from its kept inputs; the rest is then there. The graph is the forward's own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from sparsam.memory.nested import mapped, tensors_in
from sparsam.memory.selective import Keeping, Reusing

__all__ = ["Segment"]


class Segment:
    """Calls of layers in the order in which they came, each fed by the one before.

    Args:
        operators: whose results are kept (see `selective`), or none.
        around: entered while it recomputes.
    """

    def __init__(
        self, operators: frozenset[Any], around: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        self._operators, self._around = operators, around
        self._calls: list[_Call] = []
        self._places: list[weakref.ref[_Place]] = []  # weak: what the graph has let go is not filled again
        self._outputs: list[tuple[weakref.ref[Tensor], int]] = []  # of the last call, and their versions

    def __len__(self) -> int:
        return len(self._calls)

    def feeds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a layer with these inputs goes on where this segment ends."""
        return any(self._link(tensor) is not None for tensor in inputs)

    def call(
        self,
        name: str,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Computes a layer, and keeps what it takes to do so again.

        Raises:
            ValueError: the layer writes into its inputs.
        """
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        start = _Start.of(layer, inputs)
        keeping = Keeping(self._operators) if self._operators else None
        begin = len(self._places)
        try:
            with saved_tensors_hooks(self._pack, _unpack), keeping or contextlib.nullcontext():
                output = forward(*args, **kwargs)
        except BaseException:
            del self._places[begin:]  # whoever goes on without this layer computes those before it again
            raise
        if [tensor._version for tensor in inputs] != versions:
            raise ValueError(
                f"{name}: expected a layer that leaves its inputs as they are, got one that writes into them: they "
                "could not be recomputed from. Make it compute out of place, or leave it out of Recompute(layers=)."
            )
        outputs = tensors_in(output)
        results = [] if keeping is None else keeping.take(outputs)
        links = [self._link(tensor) for tensor in inputs]
        kept = [tensor.detach() for tensor, link in zip(inputs, links, strict=True) if link is None]
        self._calls.append(
            _Call(
                name=name,
                layer=layer,
                forward=forward,
                arguments=_template((args, kwargs)),
                results=_template(results),
                links=links,
                need_gradient=[tensor.requires_grad for tensor in inputs],
                kept=_keep([*kept, *tensors_in(results)]),
                start=start.settled(),
                end=len(self._places),
            )
        )
        self._outputs = [(weakref.ref(tensor), tensor._version) for tensor in outputs]
        return output

    def recompute(self) -> None:
        """Fills all places that the graph still holds.

        Raises:
            ValueError: weights have changed since the forward, or the layers save other tensors than they did.
        """
        places = [place() for place in self._places]
        last = max(index for index, place in enumerate(places) if place is not None)
        reached = -1

        def fill(saved: Tensor) -> Tensor:
            nonlocal reached
            reached += 1
            saved = saved.detach()  # an operator's own result would hold on to the operator that holds it
            place = places[reached] if reached < len(places) else None
            if place is not None:
                if (saved.shape, saved.dtype) != (place.shape, place.dtype):
                    raise _other(call.name, f"{_text(place.shape, place.dtype)}", f"{_text(saved.shape, saved.dtype)}")
                place.value = saved
            if reached == last:
                raise _Filled  # nothing after it is needed
            return saved

        outputs: list[Tensor] = []
        try:
            with self._around(), torch.enable_grad(), saved_tensors_hooks(fill, lambda saved: saved):
                for call in self._calls:
                    outputs = tensors_in(call.again(outputs, self._operators))
                    if reached + 1 != call.end:
                        raise _other(call.name, f"{call.end} tensors by then", f"{reached + 1}")
        except _Filled:
            return
        raise AssertionError("the last place is one of the last call")

    def _pack(self, tensor: Tensor) -> _Place:
        place = _Place(self, tensor.shape, tensor.dtype)
        self._places.append(weakref.ref(place))
        return place

    def _link(self, tensor: Tensor) -> int | None:
        """Which output of the last call a tensor is, if it is one as it was given."""
        for position, (output, version) in enumerate(self._outputs):
            if output() is tensor and tensor._version == version:
                return position
        return None


class _Filled(Exception):
    """A recomputation has come far enough."""


class _Place:
    """What the graph holds instead of a saved tensor."""

    __slots__ = ("__weakref__", "dtype", "segment", "shape", "value")

    def __init__(self, segment: Segment, shape: torch.Size, dtype: torch.dtype) -> None:
        self.segment, self.shape, self.dtype = segment, shape, dtype
        self.value: Tensor | None = None


def _unpack(place: _Place) -> Tensor:
    if place.value is None:
        place.segment.recompute()
    # given once and kept no longer: of a graph that is retained, the next backward computes it again
    value, place.value = place.value, None
    assert value is not None, "a recomputation fills every place that is asked for"
    return value


@dataclass(frozen=True)
class _Hole:
    """Where a tensor goes."""

    index: int


def _template(value: Any) -> Any:
    """The value with holes in place of tensors, numbered."""
    count = iter(range(1 << 62))
    return mapped(value, lambda _: _Hole(next(count)))


@dataclass
class _Call:
    """One call of a layer.

    Attributes:
        arguments: positional and by name, with holes for tensors.
        results: of operators that are not run again, with holes for tensors.
        links: for each input which output of the call before it is, or None: it is kept.
        need_gradient: for each input.
        kept: autograd's own node over the kept inputs and results, so that hooks around the model see them too.
        start: what else it depends on.
        end: tensors that the segment has saved when it is over.
    """

    name: str
    layer: nn.Module
    forward: Callable[..., Any]
    arguments: Any
    results: Any
    links: list[int | None]
    need_gradient: list[bool]
    kept: Any
    start: _Start
    end: int

    def again(self, outputs: Sequence[Tensor], operators: frozenset[Any]) -> Any:
        """Computes the layer once more, as it was then.

        Args:
            outputs: of the call before.
            operators: whose results were kept.
        """
        if _versions(self.layer) != self.start.versions:
            raise ValueError(
                f"{self.name}: expected the weights of the forward pass when its backward recomputes it, got changed "
                "ones. Call backward() before the optimiser steps or a topology changes."
            )
        kept = [] if self.kept is None else list(self.kept.saved_tensors)
        kept.reverse()
        inputs = [
            (kept.pop() if link is None else outputs[link]).detach().requires_grad_(need)
            for link, need in zip(self.links, self.need_gradient, strict=True)
        ]
        kept.reverse()
        args, kwargs = mapped(self.arguments, lambda hole: inputs[hole.index], _Hole)
        results = mapped(self.results, lambda hole: kept[hole.index].detach(), _Hole)
        reusing = Reusing(operators, results) if operators else contextlib.nullcontext()
        with self.start.again(), reusing:
            return self.forward(*args, **kwargs)


@dataclass(frozen=True)
class _Start:
    """What a layer's computation depends on, besides its inputs and weights, when it begins.

    Attributes:
        versions: of the layer's parameters, by which a change of them shows.
        random: state of the CPU's generator; devices: those of other devices.
        generators: that the layer has for itself, and their states.
        autocast: device type, whether it is on, type and cache of it.
        modes: modules, and whether each was training.
        buffers: module, name, the buffer, its version and a copy: a batch norm's statistics, an observer's range.
    """

    versions: list[int]
    random: Tensor
    device: str
    devices: tuple[list[int], list[Tensor]]
    generators: list[tuple[torch.Generator, Tensor]]
    autocast: list[tuple[str, bool, torch.dtype, bool]]
    modes: list[tuple[nn.Module, bool]]
    buffers: list[tuple[nn.Module, str, Tensor, int, Tensor]]

    @classmethod
    def of(cls, layer: nn.Module, inputs: Sequence[Tensor]) -> _Start:
        device = next((tensor.device.type for tensor in inputs if tensor.device.type not in ("cpu", "meta")), "cpu")
        cached = torch.is_autocast_cache_enabled()
        return cls(
            versions=_versions(layer),
            random=torch.get_rng_state(),
            device=device,
            devices=get_device_states(*inputs) if device != "cpu" else ([], []),
            generators=[
                (value, value.get_state())
                for module in layer.modules()
                for value in vars(module).values()
                if isinstance(value, torch.Generator)
            ],
            autocast=[
                (one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one), cached)
                for one in dict.fromkeys(("cpu", device))
            ],
            modes=[(module, module.training) for module in layer.modules()],
            buffers=[
                (module, name, buffer, buffer._version, buffer.detach().clone())
                for module in layer.modules()
                for name, buffer in module._buffers.items()
                # no statistic is a bool, but topologies are, and large
                if buffer is not None and buffer.dtype != torch.bool
            ],
        )

    def settled(self) -> _Start:
        """The same, with copies of those buffers alone that the layer has written to since, or may have."""
        self.buffers[:] = [
            (module, name, buffer, version, copy)
            for module, name, buffer, version, copy in self.buffers
            # torch's batch_norm writes to its statistics without a word, and they are rows
            if module._buffers.get(name) is not buffer
            or buffer._version != version
            or (buffer.is_floating_point() and buffer.dim() <= 1)
        ]
        return self

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was then, and afterwards as it is now: what the layer learns of its batch it has learnt."""
        now = [(module, name, module._buffers[name]) for module, name, *_ in self.buffers]
        modes = [(module, module.training) for module, _ in self.modes]
        states = [(generator, generator.get_state()) for generator, _ in self.generators]
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype, cached in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cached))
            stack.enter_context(torch.random.fork_rng(self.devices[0], device_type=self.device))
            torch.set_rng_state(self.random)
            if self.devices[0]:
                set_device_states(*self.devices, device_type=self.device)
            try:
                for generator, state in self.generators:
                    generator.set_state(state)
                for module, training in self.modes:
                    module.training = training
                # others in their place, not written over: whoever holds the buffers sees no change
                for module, name, _, _, copy in self.buffers:
                    module._buffers[name] = copy.clone()
                yield
            finally:
                for module, training in modes:
                    module.training = training
                for module, name, buffer in now:
                    module._buffers[name] = buffer
                for generator, state in states:
                    generator.set_state(state)


class _Keep(torch.autograd.Function):
    """Has tensors saved by autograd, for its hooks and its check that nobody has written into them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing leads here")


def _keep(tensors: Sequence[Tensor]) -> Any:
    if not tensors:
        return None
    return _Keep.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn


def _versions(layer: nn.Module) -> list[int]:
    return [parameter._version for parameter in layer.parameters()]


def _other(name: str, expected: str, got: str) -> ValueError:
    return ValueError(
        f"{name}: expected a recomputation that saves {expected} as the forward did, got {got}. What the layer "
        "computes must depend on its inputs, weights, buffers and torch's random numbers alone."
    )


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype} of {tuple(shape)}"
