"""Every method in every storage on two ranks with other seeds, weights and data: one topology, equal weights."""

from __future__ import annotations

from pathlib import Path

from ranks import on_two_ranks

BODY = """
sys.path.insert(0, {folder!r})
from conftest import Job
from test_methods import METHODS

for method, case in METHODS.items():
    for storage in case.storages:
        made = case.job(Job, storage, seed=rank, weights_seed=rank, wrap=DDP)
        made.batches = 1000 * rank
        first = hashes(made.model)
        for step in range(6):
            made.run(1)
            a, b = gathered((hashes(made.model), weights(made.model)))
            assert a == b, (method, storage, step)
        state = made.session.state_dict()["parts"][0]
        kept = {{what: str(state[what]) for what in ("accumulators", "hidden", "ever_active")}}
        a, b = gathered(kept)
        assert a == b, (method, storage)
"""


def test_ranks_agree(tmp_path):
    on_two_ranks(BODY.format(folder=str(Path(__file__).parent)), tmp_path)
