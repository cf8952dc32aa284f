"""The part that moves saved activations out of the device's memory until the backward needs them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sparsam.memory.storages import kept, own_storages, storage_of, unchanged
from sparsam.session import Part, Session

__all__ = ["Offload"]


class Offload(Part):
    """Moves tensors that autograd saves to the host's memory, or to a folder, until the backward asks for them.

    What comes back is bit for bit what went. Weights and buffers stay; so does what is smaller than `min_bytes`. A
    tensor that two operators save is moved twice. Beside a `Recompute` only what that keeps is moved. It costs the way
    there and back: on an accelerator over its link, in a folder over the disk.

    Args:
        min_bytes: smaller tensors stay where they are.
        folder: moves to a file here that has no name, so that nothing is left behind however the process ends; None
            moves to pinned memory of the host, for models on an accelerator.

    Attributes:
        moved_bytes: in the last forward pass.

    Raises:
        ValueError: fewer than 0 bytes, no such folder; when attached: a model on a CPU and no folder.
        OSError: in a forward pass, the folder is full.
    """

    def __init__(self, min_bytes: int = 1 << 20, folder: str | os.PathLike[str] | None = None) -> None:
        if min_bytes < 0:
            raise ValueError(f"min_bytes: expected 0 or more, got {min_bytes}.")
        self.min_bytes = min_bytes
        self.folder = None if folder is None else Path(folder).expanduser()
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"folder: expected a folder that exists, got {self.folder}. Make it, on a disk with room.")
        self.moved_bytes = 0
        self._own: set[tuple[str, int] | None] = set()
        self._file: _File | None = None

    def attach(self, session: Session) -> None:
        device = next(session.model.parameters()).device
        if device.type == "cpu" and self.folder is None:
            raise ValueError(
                "Offload: expected a model on an accelerator, got one on the CPU, whose memory is the host's already. "
                "Give a folder on a disk: Offload(folder=...), or recompute instead: Recompute()."
            )
        self.session = session

    @contextlib.contextmanager
    def forward(self) -> Any:
        if not torch.is_grad_enabled():
            yield
            return
        self._own, self.moved_bytes = own_storages(self.session.model), 0
        self._file = None if self.folder is None else _File(self.folder)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._file = None  # what the graph holds has it still

    def metrics(self) -> dict[str, float]:
        return {"memory.offloaded": float(self.moved_bytes)}

    def detach(self) -> None:
        self._own, self.moved_bytes = set(), 0

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int] | _Moved:
        tensor = tensor.detach()  # an operator's own result would hold on to the operator that holds it
        size = tensor.numel() * tensor.element_size()
        where = storage_of(tensor)
        # what is expanded would take more room there than here
        if size < max(1, self.min_bytes) or where is None or where in self._own or _is_expanded(tensor):
            return kept(tensor)
        if type(tensor) is not Tensor or (self._file is None and tensor.device.type == "cpu"):
            return kept(tensor)
        self.moved_bytes += size
        return _Moved(tensor, self._file)


class _Moved:
    """A tensor elsewhere, with its shape and strides: other strides would be other sums in a product."""

    def __init__(self, tensor: Tensor, file: _File | None) -> None:
        self._like = torch.empty_like(tensor, device="meta")
        self._device, self._file = tensor.device, file
        if file is None:
            self._kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._kept.copy_(tensor, non_blocking=True)
        else:
            dense = torch.empty_like(tensor, device="cpu").copy_(tensor)  # without the gaps of a view
            self._place = file.write(dense)

    def back(self) -> Tensor:
        if self._file is None:
            return self._kept.to(self._device, non_blocking=True)
        tensor = torch.empty_like(self._like, device="cpu")
        self._file.read(self._place, tensor)
        return tensor.to(self._device)


def _unpack(packed: tuple[Tensor, int] | _Moved) -> Tensor:
    return packed.back() if isinstance(packed, _Moved) else unchanged(packed, "Offload")


class _File:
    """A file without a name: it is gone when nobody holds it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._size = folder, 0
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed with the last tensor)

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()

    def write(self, tensor: Tensor) -> int:
        """Appends a dense tensor; returns where it begins."""
        data, place = _bytes(tensor), self._size
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], place + written)
        except OSError as error:
            raise OSError(
                error.errno,
                f"Offload: cannot write {len(data)} bytes to {self._folder}: {error.strerror}. "
                "Free some room, or give another folder.",
            ) from error
        self._size += len(data)
        return place

    def read(self, place: int, tensor: Tensor) -> None:
        """Fills a dense tensor from where it begins."""
        data = _bytes(tensor)
        read = 0
        while read < len(data):
            count = os.preadv(self._file.fileno(), [data[read:]], place + read)
            assert count > 0, "nobody else knows this file"
            read += count


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor without gaps, in the order in which it lies there."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
