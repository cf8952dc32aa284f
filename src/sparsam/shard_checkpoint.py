"""Checkpoints of a session under FSDP2, by torch.distributed.checkpoint: every rank writes and reads its own parts.

    save_shards(folder, session)          # on all ranks

    model = build()                       # the same sparsify, in a new process, on any number of ranks
    match_slots(model, folder)            # only where numbers of blocks may differ; before fully_shard
    fully_shard(model); optimizer = ...; session = ...
    load_shards(folder, session)          # on all ranks

Weights, topologies and moments come back exactly; on as many ranks as before the training goes on bit for bit. The
folder must be one that all ranks see. It is whole once it has its `.metadata`, which torch writes last and as a pickle:
load only what you have written. For training without FSDP2 see `checkpoint.py`, which never unpickles.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from sparsam.checkpoint import read, write
from sparsam.session import Session
from sparsam.shards import is_sharded, refuse_sharded
from sparsam.sparse.layers import SparseLinear

if dist.is_available():  # some builds of torch come without: then nothing is sharded
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["load_shards", "match_slots", "save_shards"]


def save_shards(folder: str | os.PathLike[str], session: Session) -> None:
    """Writes model, optimiser and session, each rank its own parts. All ranks call it, between steps.

    Args:
        folder: where it goes; must not hold a checkpoint.
        session: whose model is under `fully_shard`; it has taken a step, since torch takes one itself where an
            optimiser has no state yet.
    """
    path = Path(folder)
    if _is_whole(path):
        raise ValueError(f"{path}: expected a folder without a checkpoint, got one with it. Name another.")
    if not session.applied_steps:
        raise ValueError("save_shards: expected a session that has taken a step, got a new one. Save after it.")
    state = session.state_dict()
    if dist.get_rank() == 0:  # it is the same on all
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path / "session", ignore_errors=True)  # of a save that was broken off
        write(path / "session", {"session": state})
    save(_states(session), checkpoint_id=path)


def load_shards(folder: str | os.PathLike[str], session: Session) -> None:
    """Takes back what `save_shards` wrote, on any number of ranks. All ranks call it.

    Args:
        folder: of `save_shards`.
        session: new, with a model, an optimiser and parts built as then.

    Raises:
        ValueError: there is no whole checkpoint, or a layer has another number of blocks (see `match_slots`).
    """
    path = Path(folder)
    for name, layer, slots in _slots(session.model, path):
        if slots != len(layer.values):
            raise ValueError(
                f"{name}: expected {slots} slots as in {path}, got {len(layer.values)}. "
                "Call match_slots(model, folder) before fully_shard."
            )
    states = _states(session)
    load(states, checkpoint_id=path)
    set_state_dict(
        session.model, session.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    session.load_state_dict(read(path / "session")["session"])


def match_slots(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Gives compact layers as many slots as a checkpoint of `save_shards` has, for `load_shards` to fill.

    Args:
        model: as `sparsify` left it, before `fully_shard` and the optimiser. Layers whose number differs are empty
            afterwards.
        folder: of `save_shards`.
    """
    refuse_sharded(model, "match_slots", "Call it before fully_shard.")
    for _, layer, slots in _slots(model, Path(folder)):
        if slots != len(layer.values):
            layer.empty(slots)
            layer.rebuild_index()


def _states(session: Session) -> dict[str, Any]:
    if not is_sharded(session.model):
        raise ValueError(
            "shards: expected a model under fully_shard, got one that is whole. Save its state_dict(), the optimiser's "
            "and the session's."
        )
    model, optimizer = get_state_dict(session.model, session.optimizer)
    return {"model": model, "optimizer": optimizer}


def _slots(model: nn.Module, path: Path) -> list[tuple[str, SparseLinear, int]]:
    """Compact layers by name, and the slots that each has in a checkpoint."""
    if not _is_whole(path):
        raise ValueError(f"{path}: expected a checkpoint of save_shards, got none that is whole. Name its folder.")
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    found = []
    for name, module in model.named_modules():
        entry = saved.get(f"model.{name}.values".replace("_orig_mod.", ""))
        if isinstance(module, SparseLinear) and isinstance(entry, TensorStorageMetadata):
            found.append((name, module, entry.size[0]))
    return found


def _is_whole(path: Path) -> bool:
    return (path / ".metadata").is_file()
