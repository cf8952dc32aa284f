"""Everything that belongs to one layer of a training, taken out on one rank and put in on another: its weights, buffers
(topologies among them), moments, and what parts of the session keep under its name. As bytes for the way, no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "Sent",
    "common",
    "copied",
    "fill",
    "merged",
    "of_layer",
    "pack",
    "receive",
    "receive_tensor",
    "release",
    "send",
    "send_tensor",
    "tensors",
    "unpack",
]

_ALIGNMENT_BYTES = 16  # of each tensor in a message, so that it can be read as its own type
_TENSOR = "tensor of this message"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
_MOST_DIMENSIONS = 8


def tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those too that a state_dict leaves out; tied ones once."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def release(layer: nn.Module) -> None:
    """Gives back the memory of a layer that another rank has. Its modules and parameters stay the objects they are."""
    for tensor in tensors(layer).values():
        tensor.grad = None
        tensor.data = tensor.data.new_empty(0)


def fill(layer: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Puts values in the place of what `release` gave back, or of others."""
    for name, tensor in tensors(layer).items():
        tensor.data = values[name]


def of_layer(state: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """What a nested state keeps under the name of a layer, or of a module or parameter in it."""
    found = {}
    for key, value in state.items():
        if _belongs(key, layer):
            found[key] = value
        elif isinstance(value, Mapping) and (inner := of_layer(value, layer)):
            found[key] = inner
    return found


def common(state: Mapping[str, Any], layers: Collection[str]) -> dict[str, Any]:
    """A nested state without what belongs to any of these layers."""
    return {
        key: common(value, layers) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not any(_belongs(key, layer) for layer in layers)
    }


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both nested states in one; what both have is the second's."""
    result = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A nested state whose tensors are its own."""

    def copy(value: Any) -> Any:
        if isinstance(value, Mapping):
            return copied(value)
        return value.detach().clone() if isinstance(value, Tensor) else value

    return {key: copy(value) for key, value in state.items()}


def pack(state: Mapping[str, Any]) -> Tensor:
    """Nested dicts and lists of plain values and tensors -> uint8 (bytes,)."""
    payload: list[Tensor] = []
    offset = 0

    def described(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            place = [offset, raw.numel()]
            padding = raw.new_zeros(-raw.numel() % _ALIGNMENT_BYTES)
            payload.extend((raw, padding))
            offset += raw.numel() + padding.numel()
            return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), *place]}
        if isinstance(value, Mapping):
            return {key: described(inner) for key, inner in value.items()}
        return [described(inner) for inner in value] if isinstance(value, list | tuple) else value

    header = json.dumps(described(state)).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    front = len(header).to_bytes(_ALIGNMENT_BYTES, "little") + header
    return torch.cat([torch.frombuffer(bytearray(front), dtype=torch.uint8), *payload])


def unpack(message: Tensor) -> dict[str, Any]:
    """What `pack` was given; its tensors have memory of their own."""
    length = int.from_bytes(bytes(message[:_ALIGNMENT_BYTES].tolist()), "little")
    front = _ALIGNMENT_BYTES + length

    def restored(value: Any) -> Any:
        if isinstance(value, list):
            return [restored(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if _TENSOR not in value:
            return {key: restored(inner) for key, inner in value.items()}
        kind, shape, offset, size = value[_TENSOR]
        raw = message[front + offset : front + offset + size].clone()
        return raw.view(getattr(torch, kind)).view(shape)

    state: dict[str, Any] = restored(json.loads(message[_ALIGNMENT_BYTES:front].numpy().tobytes()))
    return state


@dataclass(frozen=True)
class Sent:
    """A tensor on its way, kept until it has arrived."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> None:
        self.work.wait()


def send_tensor(x: Tensor, to: int) -> list[Sent]:
    """Sends a tensor, its type and its shape to a rank, without waiting.

    Raises:
        ValueError: more dimensions than fit, or not of a float type.
    """
    x = x.detach().contiguous()
    if x.dim() > _MOST_DIMENSIONS or x.dtype not in _DTYPES:
        raise ValueError(
            f"rank {to}: expected a float tensor of at most {_MOST_DIMENSIONS} dimensions to send there, "
            f"got {x.dtype} of {tuple(x.shape)}."
        )
    header = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *x.shape, *[0] * (_MOST_DIMENSIONS - x.dim())])
    return [_sent(header, to), _sent(x, to)]


def receive_tensor(source: int) -> Tensor:
    """What `source` sends here by `send_tensor`."""
    header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64)
    dist.recv(header, source)
    kind, dimensions, *shape = header.tolist()
    x = torch.empty(shape[:dimensions], dtype=_DTYPES[kind])
    dist.recv(x, source)
    return x


def send(state: Mapping[str, Any], to: int) -> list[Sent]:
    """Sends a nested state to a rank, without waiting."""
    return send_tensor(pack(state), to)


def receive(source: int) -> dict[str, Any]:
    """What `source` sends here by `send`."""
    return unpack(receive_tensor(source))


def _sent(x: Tensor, to: int) -> Sent:
    work = dist.isend(x, to)
    assert work is not None, "every process is in the default group"
    return Sent(work, x)


def _belongs(key: object, layer: str) -> bool:
    return isinstance(key, str) and (key == layer or key.startswith(layer + "."))
