from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from sparsam import checkpoint

STATE = {
    "model": {"a.weight": torch.arange(6.0).view(2, 3), "empty": torch.empty(0, 4), "scalar": torch.tensor(7)},
    "optimizer": {
        "state": {"a.weight": {"step": torch.tensor(3.0), "mean": torch.randn(2, 3)}},
        "groups": [{"lr": 1e-3}],
    },
    "run": {"step": 3, "note": "Grüße", "nothing": None, "yes": True, "tenth": 0.1, "inf": math.inf, 4: "int key"},
    "lists": [1, (2, 3.5), [torch.ones(2, dtype=torch.bool)], {"$odd": 1}],
}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    size = checkpoint.write(tmp_path / "c", STATE)
    assert equal(checkpoint.read(tmp_path / "c"), STATE)
    assert equal(
        checkpoint.read(tmp_path / "c", groups=("model", "run")), {key: STATE[key] for key in ("model", "run")}
    )
    assert size == sum(path.stat().st_size for path in (tmp_path / "c").iterdir() if path.name != "manifest.json")


@pytest.mark.parametrize("dtype", list(checkpoint._DTYPES), ids=str)
def test_every_dtype_survives(tmp_path, dtype):
    tensor = (torch.randn(3, 5) * 4).to(dtype)
    checkpoint.write(tmp_path / "c", {"x": {"t": tensor, "view": torch.stack([tensor, tensor])[:, 1:, ::2]}})
    assert equal(checkpoint.read(tmp_path / "c")["x"]["view"], torch.stack([tensor, tensor])[:, 1:, ::2])


def test_the_files_are_plain_safetensors_and_json(tmp_path):
    checkpoint.write(tmp_path / "c", STATE)
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".json"] * 2 + [".safetensors"] * 3
    loaded = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE["model"].items())


def test_a_tied_tensor_is_written_once(tmp_path):
    weight = torch.randn(100, 100)
    checkpoint.write(tmp_path / "c", {"model": {"embedding": weight, "head": weight, "half": weight[:50]}})
    assert (tmp_path / "c" / "model.safetensors").stat().st_size < 1.6 * weight.numel() * 4
    assert equal(checkpoint.read(tmp_path / "c"), {"model": {"embedding": weight, "head": weight, "half": weight[:50]}})


def test_a_value_that_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match=r"^session/part: expected tensors, numbers, .* got set\.$"):
        checkpoint.pack({"session": {"part": {1, 2}}})


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damage_is_found(tmp_path, name, damage):
    checkpoint.write(tmp_path / "c", STATE)
    path = tmp_path / "c" / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-3])
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.read(tmp_path / "c")
    assert "not a whole checkpoint" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_newer_format_is_refused(tmp_path):
    checkpoint.write(tmp_path / "c", STATE)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(checkpoint.CheckpointError, match=r"format 99 is newer than 1, .* Upgrade Sparsam\.$"):
        checkpoint.read(tmp_path / "c")


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(tmp_path / "c", STATE)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write_json(tmp_path / "x.json", {})
    assert list(tmp_path.iterdir()) == []


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimiser_goes_on_bit_for_bit(tmp_path, build):
    def steps(model, optimizer, count):
        for _ in range(count):
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    one, two = small(), small()
    first, second = build(one.parameters()), build(two.parameters())
    steps(one, first, 2)
    first.param_groups[0]["lr"] = 0.05
    state = {"o": checkpoint.optimizer_state(one, first), "m": one.state_dict(), "rng": checkpoint.rng_state()}
    checkpoint.write(tmp_path / "c", state)
    steps(one, first, 2)
    state = checkpoint.read(tmp_path / "c")
    two.load_state_dict(state["m"])
    checkpoint.load_optimizer(two, second, state["o"])
    checkpoint.set_rng_state(state["rng"])
    steps(two, second, 2)
    assert equal(dict(one.state_dict()), dict(two.state_dict()))
    assert equal(checkpoint.optimizer_state(one, first), checkpoint.optimizer_state(two, second))


def test_the_state_of_another_model_is_refused():
    one, two = small(), nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    state = checkpoint.optimizer_state(one, torch.optim.SGD(one.parameters()))
    with pytest.raises(ValueError, match=r"expected the optimiser state of this model's parameters, .*0\.bias differ"):
        checkpoint.load_optimizer(two, torch.optim.SGD(two.parameters()), state)


def test_random_states_come_back(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist(), random.gauss(0, 1)  # noqa: NPY002

    draw()
    checkpoint.write(tmp_path / "c", {"rng": checkpoint.rng_state()})
    expected = draw()
    draw()
    checkpoint.set_rng_state(checkpoint.read(tmp_path / "c")["rng"])
    assert draw() == expected


def test_saved_state_loads_with_weights_only(tmp_path):
    checkpoint.write(tmp_path / "c", STATE)
    torch.save(checkpoint.read(tmp_path / "c"), tmp_path / "file")
    assert equal(torch.load(tmp_path / "file", weights_only=True), STATE)
