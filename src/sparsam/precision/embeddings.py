"""What embeddings give, in autocast's type: torch leaves it in that of the table, for it is no product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EmbeddingOutputs"]


class EmbeddingOutputs:
    """Casts the outputs of all nn.Embedding and nn.EmbeddingBag of a model while autocast is on; tables stay float32.

    Args:
        model: its embeddings get a hook.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = (nn.Embedding, nn.EmbeddingBag)
        self.names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        self._hooks = [model.get_submodule(name).register_forward_hook(_as_autocast) for name in self.names]

    def remove(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()


def _as_autocast(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    device = output.device.type
    return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output
