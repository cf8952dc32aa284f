"""What is stored comes back exactly; what is damaged, newer or another model's is refused in one line."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import sparsam as sp
from sparsam.compress.quantise import quantise
from sparsam.deploy import storage
from sparsam.deploy.storage import StorageError, load, read_header, save
from sparsam.sparse.layers import ActivatedLinear, SparseLinear


class Net(nn.Module):
    """A tied head, a convolution, a batch norm, an attention, an activation: what models have."""

    def __init__(self, width=48):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = ActivatedLinear(width, 64, activation="gelu"), nn.Linear(64, width, bias=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.norm(self.conv(self.tokens(tokens).mT)).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + self.down(self.up(x)))


def net(pattern=None, **options):
    model = Net()
    if pattern is not None:
        sp.sparsify(model, pattern, 0.4, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter) * (parameter != 0))
    model(torch.zeros(2, 5, dtype=torch.long))  # a running mean
    return model.eval()


def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        assert torch.equal(a.eval()(tokens), b.eval()(tokens))


KINDS = {
    "dense": lambda: net(),
    "blocks": lambda: net(sp.Block(16, 16)),
    "blocks padded": lambda: net(sp.Block(10, 7)),
    "masked blocks": lambda: net(sp.Block(8, 8), storage="masked"),
    "unstructured": lambda: net(sp.Unstructured(), embeddings=True),
    "2:4": lambda: net(sp.NM(2, 4)),
    "neurons": lambda: net(sp.Neuron()),
    "bf16": lambda: net(sp.Block(16, 16)).bfloat16(),
    "fp16": lambda: net(sp.Unstructured()).half(),
    "int8": lambda: quantised(net()),
    "int8 blocks": lambda: quantised(net(sp.Block(16, 16))),
    "int8 unstructured": lambda: quantised(net(sp.Unstructured())),
    "int8 static": lambda: quantised(net(sp.Block(16, 16)), input_scales={"up": 0.05}),
    "int8 in bf16": lambda: quantised(net(sp.Block(16, 16)).bfloat16()),
    "int4": lambda: quantised(net(), weights="int4", group=16),
    "int4 blocks": lambda: quantised(net(sp.Block(16, 16)), weights="int4", group=8),
}


def quantised(model, **options):
    quantise(model, **options)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_exactly(kind, tmp_path):
    model = KINDS[kind]()
    size = save(model, tmp_path / "deep" / "stored")
    assert size == sum(file.stat().st_size for file in (tmp_path / "deep" / "stored").iterdir())
    again = load(tmp_path / "deep" / "stored", Net)
    if kind == "int8 unstructured":  # its topologies are zeros among codes
        assert type(again.up) is type(model.up)
    same(model, again)
    assert again.head.weight is again.tokens.weight
    save(again, tmp_path / "again")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("deep/stored", "again"))
    assert first == second
    assert {file.name for file in tmp_path.iterdir()} == {"deep", "again"}


def test_dead_slots_and_the_order_of_slots_are_not_stored(tmp_path):
    model = net(sp.Block(16, 16), headroom=0.5)
    for layer in (model.up, model.down):
        topology = layer.topology.flatten()
        layer.rewire(topology[torch.randperm(len(topology))].view(layer.grid))
        layer.values.data.normal_()
    dense = copy.deepcopy(model)
    sp.densify(dense)
    save(model, tmp_path / "stored")
    again = load(tmp_path / "stored", Net())
    assert len(again.up.values) == int(model.up.topology.sum()) < len(model.up.values)
    assert torch.equal(again.up.weight, model.up.weight)
    stored = load_file(tmp_path / "stored" / "model.safetensors")
    assert stored["up.block_row"].dtype == np.uint16
    assert np.all(np.diff(stored["up.block_row"].astype(int) * again.up.grid[1] + stored["up.block_col"]) > 0)
    sp.densify(again)
    same(dense, again)


def test_a_loaded_model_trains_on_and_takes_a_model_that_is_sparse_already(tmp_path):
    model = net(sp.Block(16, 16))
    save(model, tmp_path / "stored")
    again = load(tmp_path / "stored", copy.deepcopy(model))
    same(model, again)
    session = sp.Session(again, torch.optim.AdamW(again.parameters()), [sp.SparseTraining(sp.static())])
    with session.forward():
        loss = again(torch.zeros(1, 4, dtype=torch.long)).square().mean()
    session.backward(loss)
    assert session.step()


@pytest.mark.parametrize(
    ("pattern", "weights", "limit"),
    [
        (sp.Block(16, 16), "int8", 0.23),
        (sp.Block(32, 32), "int8", 0.23),
        (sp.Block(8, 8), "int8", 0.23),
        (sp.Unstructured(), "int8", 0.34),
        (sp.Block(16, 16), "int4", 0.15),
    ],
    ids=str,
)
def test_sizes_at_80_percent(pattern, weights, limit, tmp_path):
    """Of the sparse layers against dense int8: a byte a weight and a scale a row."""

    def build():
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    model = build()
    sp.sparsify(model, pattern, 0.2)
    quantise(model, weights, group=16)
    size = save(model, tmp_path / "stored")
    assert size / (4 * (512 * 512 + 4 * 512)) <= limit
    layer = load(tmp_path / "stored", build)[0]
    assert torch.equal(layer.weight, model[0].weight)


def test_texts_go_with_it(tmp_path):
    save(net(), tmp_path / "stored", texts={"recipe.yaml": "version: 1\n"})
    assert (tmp_path / "stored" / "recipe.yaml").read_text() == "version: 1\n"
    header = read_header(tmp_path / "stored")
    assert header["files"].keys() == {"model.safetensors", "recipe.yaml"}
    (tmp_path / "stored" / "recipe.yaml").write_text("version: 2\n")
    with pytest.raises(StorageError, match=r"recipe.yaml is damaged: its SHA-256 is another one"):
        load(tmp_path / "stored", Net())


def edited(folder, change):
    """Changes the header and signs it again, as somebody else's program might."""
    path = folder / "sparsam.json"
    header = json.loads(path.read_text())
    change(header)
    header["sha256"] = storage._digest(header)
    path.write_text(json.dumps(header))


def damage(folder, what):
    tensors, header = folder / "model.safetensors", folder / "sparsam.json"
    match what:
        case "a bit":
            data = bytearray(tensors.read_bytes())
            data[-3] ^= 4
            tensors.write_bytes(data)
        case "cut":
            tensors.write_bytes(tensors.read_bytes()[:-7])
        case "no tensors":
            tensors.unlink()
        case "no header":
            header.unlink()
        case "half a header":
            header.write_text(header.read_text()[:200])
        case "another number":
            header.write_text(header.read_text().replace('"rows": 16', '"rows": 32', 1))
        case "a list":
            header.write_text("[]")
        case "newer":
            edited(folder, lambda header: header.update(format=storage.FORMAT + 1))
        case "another path":
            edited(folder, lambda header: header["files"].update({"../x": {"bytes": 0, "sha256": ""}}))
        case "a pickle":
            tensors.write_bytes(pickle.dumps(Trap()))
            edited(folder, lambda header: header["files"].update({tensors.name: storage._entry(tensors)}))
        case "no values":
            edited(folder, lambda header: header["layers"]["up"]["tensors"].remove("values"))
        case "no pattern":
            edited(folder, lambda header: header["layers"]["up"]["pattern"].update(kind="Spiral"))
        case "larger blocks":
            edited(folder, lambda header: header["layers"]["up"]["pattern"].update(rows=64, cols=48))


class Trap:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a bit", "model.safetensors is damaged: its SHA-256 is another one. Export the model again."),
        ("cut", "model.safetensors is damaged: expected"),
        ("no tensors", "model.safetensors is missing"),
        ("no header", "expected a stored model (with sparsam.json in it), found none"),
        ("half a header", "not a whole stored model"),
        ("another number", "sparsam.json is damaged"),
        ("a list", "not a whole stored model"),
        ("newer", "format 2 is newer than 1, the newest that this Sparsam reads. Upgrade Sparsam."),
        ("another path", "sparsam.json names other files"),
        ("a pickle", "cannot be loaded into this model"),
        ("no values", "cannot be loaded into this model"),
        ("no pattern", "cannot be loaded into this model"),
        ("larger blocks", "cannot be loaded into this model"),
    ],
)
def test_what_is_damaged_or_newer_is_refused_in_one_line(what, message, tmp_path):
    save(net(sp.Block(16, 16)), tmp_path / "stored")
    damage(tmp_path / "stored", what)
    with pytest.raises(StorageError) as error:
        load(tmp_path / "stored", Net())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(tmp_path / "stored") in str(error.value)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Other, "up: expected a linear layer of 64 x 48, the model has Linear 4 x 3. Build the model that was saved."),
        (lambda: nn.Sequential(nn.Linear(3, 3)), "up: the model has no layer of this name"),
        (lambda: Net(width=64), "up: expected a linear layer of 64 x 48"),
    ],
    ids=["shapes", "names", "width"],
)
def test_another_model_is_refused(build, message, tmp_path):
    save(net(sp.Block(16, 16)), tmp_path / "stored")
    with pytest.raises(StorageError) as error:
        load(tmp_path / "stored", build())
    assert message in str(error.value)


class Odd(sp.Unstructured):
    """Somebody's own pattern."""


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}


def of_odd_pattern():
    model = nn.Sequential(nn.Linear(8, 8))
    sp.sparsify(model, Odd(), 0.5)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (of_odd_pattern, "expected a pattern of Block, Unstructured, NM, Neuron, got Odd"),
        (lambda: nn.Sequential(Extra(2, 2)), "0._extra_state: expected a tensor, got a dict"),
        (lambda: SparseLinear(8, 8, torch.ones(2, 2, dtype=torch.bool), sp.Block(4, 4)), "Put it into nn.Sequential"),
    ],
    ids=["pattern", "extra state", "a layer"],
)
def test_what_cannot_be_stored_leaves_nothing(build, message, tmp_path):
    with pytest.raises(ValueError) as error:
        save(build(), tmp_path / "stored")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_old_folder_is_left_alone_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    save(net(), tmp_path / "stored")
    with pytest.raises(ValueError, match="expected a new folder for the model, it exists"):
        save(net(), tmp_path / "stored")
    with pytest.raises(ValueError, match="expected plain names of files in texts"):
        save(net(), tmp_path / "other", texts={"../x": ""})

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        save(net(), tmp_path / "other")
    assert [file.name for file in tmp_path.iterdir()] == ["stored"]
