"""What an accumulation window is to a model on several ranks: when DDP and FSDP2 exchange its gradients.

Both exchange in a window's last backward. Until then DDP keeps this rank's sums in the gradients themselves, FSDP2
keeps them whole, unsharded, out of sight: as many bytes as the model has, on each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.shards import is_part, is_sharded, is_unit

__all__ = ["averages", "check_shards", "exchange", "exchanging", "group_of"]


def averages(model: nn.Module) -> bool:
    """Whether gradients are averaged over ranks."""
    model = _inside(model)
    return isinstance(model, DistributedDataParallel) or is_unit(model)


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which gradients are averaged; None where that is all there are, or none."""
    model = _inside(model)
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    meshes = {one.device_mesh for one in model.parameters() if is_part(one)}
    # a mesh of several dimensions has no one group
    return meshes.pop().get_group() if len(meshes) == 1 and all(mesh.ndim == 1 for mesh in meshes) else None


def exchanging(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[object]:
    """Surrounds a forward pass: its backward exchanges gradients if it is the window's last."""
    model = _inside(model)
    if is_unit(model):
        model.set_requires_gradient_sync(last)  # read in the backward: it stays until the next forward
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def exchange(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Does for a window cut short what the last backward does, which never came."""
    model = _inside(model)
    if is_unit(model):
        model.set_requires_gradient_sync(True)
        # torch has no public call for it: what FSDP2 queues at the end of each backward
        model._get_fsdp_state()._root_post_backward_final_callback()
    elif isinstance(model, DistributedDataParallel):
        ignored = {one for name, one in model.module.named_parameters() if name in model.parameters_to_ignore}
        _average([one for one in parameters if one not in ignored], model.process_group)


def check_shards(model: nn.Module, held: Iterable[nn.Parameter]) -> None:
    """Puts the parts of a model under `fully_shard` in place, and makes sure that they are what an optimiser holds.

    Raises:
        ValueError: a trained parameter is not sharded, so that no rank would hear of its gradient; or the optimiser
            holds parameters that the model has no more.
    """
    if not is_sharded(model):
        return
    for module in model.modules():
        if is_unit(module):
            module.reshard()  # an evaluation leaves the outermost one whole
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_part(parameter):
            raise ValueError(
                f"{name}: expected every trained parameter under fully_shard, got one that is not: its gradient would "
                "stay on this rank. Call fully_shard(model) on the whole model last, without ignored_params."
            )
    if not all(is_part(parameter) for parameter in held):
        raise ValueError(
            "optimizer: expected parameters of a model under fully_shard, got some that are whole. Build the optimiser "
            "after fully_shard, and before a forward or after model.reshard()."
        )


def _inside(model: nn.Module) -> nn.Module:
    return model.get_submodule("_orig_mod") if hasattr(model, "_orig_mod") else model


def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    if not parameters:
        return
    used = torch.tensor(
        [parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=parameters[0].device
    )
    dist.all_reduce(used, dist.ReduceOp.MAX, group)
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient.div_(dist.get_world_size(group))
