"""The page that documents the stored form: its examples run, and its reader reads every kind of layer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import sparsam as sp

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture
def page(tmp_path, monkeypatch, capsys):
    """What the examples define, run one after the other."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for example in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(example, "docs/format.md", "exec"), names)
    assert capsys.readouterr().out == "(128, 64)\n"
    return names


def test_the_reader_reads_every_kind(page, tmp_path):
    patterns = [sp.Block(16, 16), sp.Block(7, 10), sp.Unstructured(), sp.NM(2, 4), sp.Neuron()]
    options = [None, {}, {"weights": "int4", "group": 2}]
    for number, (pattern, how, storage) in enumerate(
        (pattern, how, storage) for pattern in patterns for how in options for storage in ("auto", "masked")
    ):
        model = nn.Sequential(nn.Linear(40, 48), nn.Conv1d(4, 6, 3), nn.Linear(48, 20).bfloat16())
        sp.sparsify(model, pattern, 0.4, storage=storage)
        if how is not None:
            sp.quantise(model, **how)
        folder = tmp_path / str(number)
        sp.save(model, folder)
        header, tensors = page["read"](folder)
        expected = {}
        for name in ("0", "1", "2"):
            layer = model.get_submodule(name)
            row = name if name in header["layers"] else f"{name}.weight"
            if row in header["layers"]:
                expected[row] = layer.weight.detach().float().flatten(1)
            else:
                assert np.array_equal(tensors[row], layer.weight.detach().float().numpy())
        assert header["layers"].keys() == expected.keys()
        for row, dense in expected.items():
            assert np.array_equal(page["weight"](header, tensors, row), dense.numpy()), (pattern, how, storage, row)


ADDRESSES = {32: (0.202, 0.201, 0.2), 16: (0.206, 0.203, 0.201), 8: (0.225, 0.213, 0.202), 4: (0.3, 0.25, 0.208)}


@pytest.mark.parametrize("height", ADDRESSES)
def test_the_sizes_of_the_page(height):
    """Bytes a block: two 32-bit addresses, two of 16 bits, or a bit for each of the five of which it is one."""
    shares = [0.2 * (1 + per_block / height**2) for per_block in (8, 4, 5 / 8)]
    assert shares == pytest.approx(ADDRESSES[height], abs=6e-4)


@pytest.mark.parametrize(("height", "share"), [(16, 0.212), (32, 0.209)])
def test_the_folders_of_the_page(height, share, tmp_path):
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    sp.sparsify(model, sp.Block(height, height), 0.2)
    sp.quantise(model)
    assert sp.save(model, tmp_path / "stored") / (4 * (512 * 512 + 4 * 512)) == pytest.approx(share, abs=1e-3)
