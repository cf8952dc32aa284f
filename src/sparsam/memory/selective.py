"""Recomputes all but the dear results: those of products and of top-k are kept, and given again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsam.kernels import attention, ops  # noqa: F401 (they define the operators)
from sparsam.memory.nested import mapped, tensors_in

__all__ = ["Keeping", "Reusing", "kept_operators"]

# by name: not every build of torch has all of them
_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "convolution", "topk"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)


def kept_operators() -> frozenset[Any]:
    """The operators whose results are kept: torch's products, attention and top-k, and this package's."""
    found = [getattr(torch.ops.aten, name, None) for name in _NAMES]
    sparsam = torch.ops.sparsam
    found += [sparsam.block_linear, sparsam.attention, sparsam.self_attention]
    return frozenset(one.default for one in found if one is not None)


class Keeping(TorchDispatchMode):
    """Notes the results of some operators while a layer computes."""

    def __init__(self, operators: frozenset[Any]) -> None:
        super().__init__()
        self._operators = operators
        self._results: list[tuple[Any, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._results.append((result, [tensor._version for tensor in tensors_in(result)]))
        return result

    def take(self, outputs: Iterable[Tensor]) -> list[Any]:
        """The results, to be asked for when the layer has computed, outside of this mode; None for those not kept.

        What the layer has written into since is not what the operator gave. And what it gives away others may write
        into; most often nothing of it is needed in the recomputation, which ends before.
        """
        given = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        results, self._results = self._results, []
        return [
            None if self._lost(result, versions, given) else mapped(result, Tensor.detach)
            for result, versions in results
        ]

    @staticmethod
    def _lost(result: Any, versions: Sequence[int], given: set[int]) -> bool:
        tensors = tensors_in(result)
        changed = any(one._version != version for one, version in zip(tensors, versions, strict=True))
        return changed or any(one.untyped_storage().data_ptr() in given for one in tensors)


class Reusing(TorchDispatchMode):
    """Gives the results that were kept, in their order, and computes everything else."""

    def __init__(self, operators: frozenset[Any], results: Sequence[Any]) -> None:
        super().__init__()
        self._operators, self._results = operators, iter(results)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            kept = next(self._results, None)
            if kept is not None:
                return kept
        return func(*args, **(kwargs or {}))
