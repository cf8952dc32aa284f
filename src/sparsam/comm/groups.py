"""Process groups that an exchange makes for itself: one of the same ranks, and those of two levels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

__all__ = ["Nodes", "can_close", "group_like", "nodes_of"]


@dataclass(frozen=True, eq=False)
class Nodes:
    """Two levels of ranks, for links that are fast within a node and slow between nodes.

    Attributes:
        inside: the ranks of this rank's node.
        between: of each node the rank that has this one's place in it.
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


def group_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, with the same patience."""
    return _made([dist.get_process_group_ranks(group)], group)


def nodes_of(group: dist.ProcessGroup, ranks_per_node: int | Literal["torchrun"]) -> Nodes:
    """Groups of two levels, made by all ranks of a group together.

    Args:
        group: its first ranks are those of the first node, and so on.
        ranks_per_node: the same on all ranks; "torchrun" for what torchrun was told (LOCAL_WORLD_SIZE).

    Raises:
        ValueError: on all ranks alike: nodes would be of different sizes.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if ranks_per_node == "torchrun" else ranks_per_node
    ranks = dist.get_process_group_ranks(group)
    told: list[int] = [0] * len(ranks)
    # ranks that made different groups would wait for each other
    dist.all_gather_object(told, local, group=group)
    if len(set(told)) > 1 or local < 1 or len(ranks) % local:
        got = f"{local}" if len(set(told)) == 1 else f"{told}"
        raise ValueError(
            f"ranks_per_node: expected one divisor of {len(ranks)} ranks on all of them, got {got}. Give the number of "
            "processes on each node; 'torchrun' is for processes that torchrun started."
        )
    inside = [ranks[first : first + local] for first in range(0, len(ranks), local)]
    return Nodes(_made(inside, group), _made([ranks[place::local] for place in range(local)], group))


def can_close(group: dist.ProcessGroup) -> bool:
    """Whether what was made of a group may be closed while others go on.

    torch names groups of a part of the ranks by these ranks and by how many groups there are. One that is made after
    another was closed can get its name, finds its old addresses, and waits for ever.
    """
    return group is dist.group.WORLD


def _made(parts: list[list[int]], of: dist.ProcessGroup) -> dist.ProcessGroup:
    """This rank's one of the groups into which all ranks of a group part."""
    timeout = of._get_backend(torch.device("cpu")).options._timeout
    own: dist.ProcessGroup | None = None
    for ranks in parts:
        mine = dist.get_rank() in ranks
        made = None
        if of is dist.group.WORLD:
            made = dist.new_group(ranks, timeout=timeout)
        elif mine:  # ranks outside of a smaller group do not come here
            made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        own = made if mine else own
    assert own is not None
    return own
