"""What version 0.1 has written is still read: its runs go on and its checkpoints load into models of today.

`tests/data/run-0.1` was written by sparsam 0.1.0: 7 of 12 steps of a tiny model, the last checkpoint at step 6.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sparsam.recipe import parse_recipe
from sparsam.run import Run
from sparsam.train import Training

DATA = Path(__file__).parent / "data"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(DATA / "run-0.1", folder)
    recipe = (folder / "recipe.yaml").read_text().replace("path: text\n", f"path: {DATA / 'text'}\n")
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def test_a_run_of_0_1_goes_on(run):
    notes = []
    with Run.open(run) as opened:
        training = Training(parse_recipe(opened.recipe), opened, notes.append)
        assert training.step == 6
        assert training.session.metrics()["topology_updates"] == 3.0
        weights = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        training.advance(12, lambda progress: None, lambda: False)
    assert all(note.startswith("This goes on from step 6, but not bit for bit") for note in notes)
    assert training.step == 12
    assert training.session.metrics()["topology_updates"] > 3.0
    assert any(not torch.equal(weights[name], tensor) for name, tensor in training.model.state_dict().items())
