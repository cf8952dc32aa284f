"""Loads the compiled CPU library and calls it on tensors; knows nothing of autograd. `ops.py` is what others use."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # before the library: both then share torch's OpenMP

from sparsam.kernels.index import BlockIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "ISAS",
    "Library",
    "available_isas",
    "current_isa",
    "library",
    "scratch_bytes",
    "set_isa",
    "threads",
]

ABI_VERSION = 1
ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu")
LIBRARY_NAME = "libsparsam_cpu.so"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_OK, _BAD_ARGUMENT, _OUT_OF_MEMORY, _UNSUPPORTED = range(4)

_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
# Arguments of the products. Plain numbers of a declared type are converted in C: a third of the call of one row.
_TYPES = {"p": _pointer, "i": _int32, "l": _int64}
_SIGNATURES = {
    "sparsam_forward": "pilplpiipppi",
    "sparsam_backward": "pilplplpipppi",
    "sparsam_scores": "pilplplpipi",
}


class _Layer(ctypes.Structure):
    """Mirror of `sparsam_layer` in csrc/sparsam.h."""

    _fields_ = [
        ("in_features", _int64),
        ("out_features", _int64),
        ("rows", _int32),
        ("cols", _int32),
        ("slots", _int64),
        ("values_dtype", _int32),
        ("values", _pointer),
        ("block_row", _pointer),
        ("block_col", _pointer),
        ("row_start", _pointer),
        ("row_slots", _pointer),
        ("col_start", _pointer),
        ("col_slots", _pointer),
    ]


class _Attention(ctypes.Structure):
    """Mirror of `sparsam_attention` in csrc/sparsam.h."""

    _fields_ = [
        ("batch", _int64),
        ("heads", _int64),
        ("tokens", _int64),
        ("head_size", _int64),
        ("scale", ctypes.c_float),
        ("causal", _int32),
    ]


class Library:
    """The C functions, with tensors in place of pointers. Every tensor is on the CPU and checked by the caller."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.c = ctypes.CDLL(str(path))
        version = self.c.sparsam_abi_version()
        if version != ABI_VERSION:
            raise RuntimeError(
                f"{path}: expected interface version {ABI_VERSION}, got {version}. Install sparsam again."
            )
        self.c.sparsam_pack_bytes.restype = self.c.sparsam_scratch_bytes.restype = _int64
        for name, signature in _SIGNATURES.items():
            getattr(self.c, name).argtypes = [_TYPES[letter] for letter in signature]

    def forward(
        self,
        x: torch.Tensor,
        values: torch.Tensor,
        index: BlockIndex,
        bias: torch.Tensor | None,
        activation: str,
        y: torch.Tensor,
        pre: torch.Tensor | None,
        packed: torch.Tensor | None = None,
    ) -> None:
        """Writes act(x W^T + bias) to y (T, N), and the value before the activation to pre when given."""
        layer = _layer(values, index, x.shape[1], y.shape[1])
        if packed is not None and (packed.numel() < 64 or packed.data_ptr() % 64):
            raise ValueError("packed weights: expected what `pack` returned, got a copy or a part. Pack again.")
        status = self.c.sparsam_forward(
            ctypes.byref(layer),
            DTYPES[x.dtype],
            x.shape[0],
            x.data_ptr(),
            x.stride(0),
            _address(bias),
            0 if bias is None else DTYPES[bias.dtype],
            ACTIVATIONS.index(activation),
            y.data_ptr(),
            _address(pre),
            _address(packed),
            threads(),
        )
        if status == _BAD_ARGUMENT and packed is not None:
            raise ValueError(
                f"packed weights: expected ones of this layer for {x.dtype} on {current_isa()}, got others. Pack again."
            )
        _check(status, "forward")

    def ready_forward(
        self, values: torch.Tensor, index: BlockIndex, in_features: int, out_features: int, dtype: torch.dtype
    ) -> Callable[..., int]:
        """sparsam_forward with its first two arguments, for many calls; the caller keeps values and index alive.

        It takes tokens, x, ldx, bias, bias_dtype, activation, y, pre, packed and threads, and returns the status.
        """
        layer = _layer(values, index, in_features, out_features)
        return functools.partial(self.c.sparsam_forward, ctypes.byref(layer), DTYPES[dtype])

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        values: torch.Tensor,
        index: BlockIndex,
        pre: torch.Tensor | None,
        activation: str,
        dx: torch.Tensor | None,
        dvalues: torch.Tensor | None,
        dbias: torch.Tensor | None,
    ) -> None:
        """Writes the gradients that are asked for: dx (T, K), dvalues (S, R, C), dbias (N) float32."""
        self._gradient("backward", grad, x, values, index, pre, activation, (dx, dvalues, dbias))

    def scores(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        values: torch.Tensor,
        index: BlockIndex,
        pre: torch.Tensor | None,
        activation: str,
        scores: torch.Tensor,
    ) -> None:
        """Writes the mean |dense gradient| of every block to scores (RB, CB) float32."""
        self._gradient("scores", grad, x, values, index, pre, activation, (scores,))

    def _gradient(
        self,
        name: str,
        grad: torch.Tensor,
        x: torch.Tensor,
        values: torch.Tensor,
        index: BlockIndex,
        pre: torch.Tensor | None,
        activation: str,
        results: Sequence[torch.Tensor | None],
    ) -> None:
        """Calls sparsam_backward or sparsam_scores, which take the same operands and differ in what they write."""
        layer = _layer(values, index, x.shape[1], grad.shape[1])
        status = getattr(self.c, f"sparsam_{name}")(
            ctypes.byref(layer),
            DTYPES[grad.dtype],
            grad.shape[0],
            grad.data_ptr(),
            grad.stride(0),
            x.data_ptr(),
            x.stride(0),
            _address(pre),
            ACTIVATIONS.index(activation),
            *map(_address, results),
            threads(),
        )
        _check(status, name)

    def pack(
        self, values: torch.Tensor, index: BlockIndex, in_features: int, out_features: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Weights laid out for the forward of a frozen model: uint8, aligned to 64 bytes; None when not needed."""
        layer = _layer(values, index, in_features, out_features)
        size = self.c.sparsam_pack_bytes(ctypes.byref(layer), _int32(DTYPES[dtype]))
        if size <= 0:
            return None
        packed = torch.empty(size + 64, dtype=torch.uint8)
        packed = packed[-packed.data_ptr() % 64 :][:size]
        status = self.c.sparsam_pack(ctypes.byref(layer), _int32(DTYPES[dtype]), _at(packed), _int32(threads()))
        _check(status, "pack")
        return packed

    def attention_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        causal: bool,
    ) -> bool:
        """Writes attention to out (B, H, T, D) and log-sum-exp to lse (B, H, T); False when this machine cannot."""
        shape = _Attention(*q.shape, scale, int(causal))
        operands = [argument for tensor in (q, k, v, out) for argument in (_at(tensor), _strides(tensor))]
        status = self.c.sparsam_attention_forward(ctypes.byref(shape), *operands, _at(lse), _int32(threads()))
        return _supported(status, "attention forward")

    def attention_backward(
        self, tensors: Sequence[torch.Tensor], lse: torch.Tensor, scale: float, causal: bool
    ) -> bool:
        """Backward of attention; tensors are q, k, v, out, dout, dq, dk, dv, of which the last three are written."""
        shape = _Attention(*tensors[0].shape, scale, int(causal))
        operands = [argument for tensor in tensors for argument in (_at(tensor), _strides(tensor))]
        status = self.c.sparsam_attention_backward(
            ctypes.byref(shape), *operands[:8], _at(lse), *operands[8:], _int32(threads())
        )
        return _supported(status, "attention backward")

    def norm_forward(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        added: torch.Tensor | None,
        out: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
    ) -> bool:
        """Writes x + branch to added, its LayerNorm to out, and mean and rstd; False when this machine cannot."""
        status = self.c.sparsam_norm_forward(
            _int64(mean.numel()),
            _int64(x.shape[-1]),
            _at(x),
            _at(branch),
            _int32(0 if branch is None else DTYPES[branch.dtype]),
            _at(weight),
            _at(bias),
            ctypes.c_float(eps),
            _at(added),
            _at(out),
            _int32(DTYPES[out.dtype]),
            _at(mean),
            _at(rstd),
            _int32(threads()),
        )
        return _supported(status, "norm forward")

    def norm_backward(
        self,
        dout: torch.Tensor,
        dadded: torch.Tensor | None,
        added: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        *gradients: torch.Tensor | None,
    ) -> bool:
        """Backward of the norm; gradients are dx, dx in bfloat16, dweight, dbias: written unless None (dx always)."""
        status = self.c.sparsam_norm_backward(
            _int64(mean.numel()),
            _int64(added.shape[-1]),
            _at(dout),
            _int32(DTYPES[dout.dtype]),
            *map(_at, (dadded, added, mean, rstd, weight, *gradients)),
            _int32(threads()),
        )
        return _supported(status, "norm backward")


@functools.cache
def library() -> Library | None:
    """The compiled library, or None where it was not built. Reads SPARSAM_CPU_ISA at the first call."""
    wanted = os.environ.get("SPARSAM_CPU_ISA", "").strip().lower()
    if wanted == "reference":
        return None
    path = _find()
    if path is None:
        if wanted:
            raise RuntimeError(
                f"SPARSAM_CPU_ISA={wanted}: expected the compiled library, got none. Install with a C++ compiler."
            )
        return None
    loaded = Library(path)
    if wanted:
        _set(loaded, wanted, "SPARSAM_CPU_ISA")
    return loaded


def available_isas() -> list[str]:
    """Instruction sets that this machine and this build can run, slowest first; empty without the library."""
    loaded = library()
    if loaded is None:
        return []
    return [name for code, name in enumerate(ISAS) if loaded.c.sparsam_has_isa(_int32(code)) == _OK]


def scratch_bytes() -> int:
    """Bytes of scratch memory that the kernels hold now, over all threads: what the largest calls so far needed."""
    loaded = library()
    return 0 if loaded is None else int(loaded.c.sparsam_scratch_bytes())


def current_isa() -> str:
    """The instruction set in use, or "reference" without the compiled library."""
    loaded = library()
    return "reference" if loaded is None else ISAS[loaded.c.sparsam_get_isa()]


def set_isa(name: str) -> None:
    """Fixes the instruction set for all later calls of this process.

    Raises:
        ValueError: the name is unknown, or this machine or build lacks it.
    """
    loaded = library()
    if loaded is None:
        raise ValueError(f"set_isa: expected the compiled library for {name!r}, got none. Install with a C++ compiler.")
    _set(loaded, name, "set_isa")


def threads() -> int:
    """Threads for one call: torch's count; 1 in a forked child, where an OpenMP pool cannot be used again."""
    return 1 if _forked else torch.get_num_threads()


def _set(loaded: Library, name: str, where: str) -> None:
    if name not in ISAS:
        raise ValueError(f"{where}: expected one of {', '.join(ISAS)} or reference, got {name!r}.")
    if loaded.c.sparsam_set_isa(_int32(ISAS.index(name))) != _OK:
        raise ValueError(f"{where}: this machine or build has no {name}. Leave it out to use the best there is.")


def _find() -> Path | None:
    # an editable install keeps the library apart from the sources: both folders are on the package's path
    folders = [Path(__file__).parent, *map(Path, sys.modules[__package__].__path__)]
    found = (folder / LIBRARY_NAME for folder in folders)
    return next((path for path in found if path.is_file()), None)


def _layer(values: torch.Tensor, index: BlockIndex, in_features: int, out_features: int) -> _Layer:
    slots, rows, cols = values.shape
    pointers = (tensor.data_ptr() for tensor in index)
    dtype = DTYPES[values.dtype]
    return _Layer(in_features, out_features, rows, cols, slots, dtype, values.data_ptr(), *pointers)


def _at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return _pointer(_address(tensor))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (_int64 * 3)(*tensor.stride()[:3])


def _supported(status: int, what: str) -> bool:
    if status == _UNSUPPORTED:
        return False
    _check(status, what)
    return True


def _check(status: int, what: str) -> None:
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"{what}: the kernel's scratch memory could not be allocated. Use fewer tokens per batch.")
    # not an assert: under python -O the caller would get memory that nobody has written
    if status != _OK:
        raise ValueError(
            f"{what}: expected operands and an index of one layer, got some that the kernel refuses (status {status}). "
            "Make the index with build_index, for this layer's blocks."
        )


_forked = False


def _mark_forked() -> None:
    global _forked  # the one fact about this process that nothing else can tell
    _forked = True


os.register_at_fork(after_in_child=_mark_forked)
