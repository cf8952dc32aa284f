"""`sparsam train --ranks N`: starts the ranks on this machine through torch's elastic agent, as torchrun does.

Not for several machines: there torchrun starts `python -m sparsam train` on each.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence

from sparsam.ranks import SILENT, RankError

__all__ = ["launch"]

_HOST = "127.0.0.1"
_PATIENCE_SECONDS = 600  # after Ctrl-C, for a step to end and the state to be saved


def launch(arguments: Sequence[str], ranks: int, restarts: int, resume: str) -> int:
    """Runs `sparsam ARGUMENTS` on so many ranks and waits for them.

    Args:
        arguments: of the command, the same for all ranks, and the same again after a failure.
        ranks: processes, all on this machine; they meet on its loopback interface.
        restarts: how often all ranks are started again after one has failed.
        resume: the command that goes on.

    Returns:
        Exit status: 0 when all went well, 130 after Ctrl-C, 1 when a rank failed and has said why.

    Raises:
        RankError: a rank was ended by a signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="sparsam-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_HOST}:0",
            local_addr=_HOST,
            max_restarts=restarts,
            shutdown_timeout=_PATIENCE_SECONDS,
        )
        logging.disable(logging.CRITICAL)  # ranks speak for themselves
        try:
            elastic_launch(config, sys.executable)("-m", "sparsam", *arguments)
        except SignalException:
            return 130
        except ChildFailedError as error:
            # the others were ended because of it
            failed = [(rank, one.exitcode) for rank, one in error.failures.items() if one.exitcode != -signal.SIGTERM]
            # one that was killed cannot say so, and others may have ended before they were
            rank, status = min(failed, key=lambda one: one[1], default=(0, 1))
            if status == 130:
                return 130
            spoken = any(other > 0 and other != SILENT for _, other in failed)  # then those that hang were killed
            if status < 0 and not spoken:
                raise RankError(
                    f"rank {rank}: ended by {signal.Signals(-status).name}, perhaps for lack of memory. "
                    f"Go on from the last checkpoint with: {resume}"
                ) from None
            return 1
        finally:
            logging.disable(logging.NOTSET)
    return 0
