"""`sparsam export`: the newest checkpoint of a run as files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsam import checkpoint
from sparsam.deploy.storage import load, read_header
from sparsam.recipe import read_recipe


def loaded(folder):
    return load(folder, read_recipe(Path(folder) / "recipe.yaml").build_model())


def test_every_format_of_a_run(sparsam, recipe):
    sparsam("train", recipe, "--out", "run", "--steps", 2)
    result = sparsam("export", "run", "--to", "sparsam")
    assert result.status == 0, result.err
    for part in ("run, step 2", "in fp32", "Export: run/export/sparsam-fp32"):
        assert part in result.out, part
    model = loaded("run/export/sparsam-fp32")
    state = checkpoint.read(Path("run/checkpoints/step-00000002"), groups=("model",))["model"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name

    assert "4 int8 blocks" in sparsam("export", "run", "--format", "int8", "--out", "out/small").out
    rows = read_header("out/small")["layers"].values()
    assert {(row["format"], row["storage"]) for row in rows} == {("int8", "blocks"), ("int8", "dense")}
    tokens = torch.randint(0, 256, (1, 16))
    with torch.no_grad():
        exact = model.eval()(tokens)
        torch.testing.assert_close(loaded("out/small").eval()(tokens), exact, rtol=0.1, atol=0.1)
        assert sparsam("export", "run", "--format", "bf16").status == 0  # Q5
        narrow = loaded("run/export/sparsam-bf16").eval()
        assert {one.dtype for one in narrow.parameters()} == {torch.bfloat16}
        torch.testing.assert_close(narrow(tokens).float(), exact, rtol=0.1, atol=0.1)
    assert "4 int4 blocks" in sparsam("export", "run", "--format", "int4", "--group", 8).out
    assert "expected a new folder for the model, it exists" in sparsam("export", "run", "--to", "sparsam").err


def test_a_dense_run(sparsam, recipe):
    sparsam("train", recipe, "--out", "run", "--steps", 1, "--set", "sparsity=null")
    assert "int8" in sparsam("export", "run", "--format", "int8").out
    assert loaded("run/export/sparsam-int8")(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: expected a run folder (with recipe.yaml in it), found none."),
        (["run"], "run: expected a run with a checkpoint, found none. Train it first."),
        (["run", "--to", "onnx"], "--to: expected sparsam, got 'onnx'."),
        (["run", "--format", "int3"], "--format: expected one of fp32, bf16, int8, int4, got 'int3'."),
    ],
    ids=str,
)
def test_what_is_refused_in_one_line(sparsam, recipe, arguments, message):
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text(recipe.read_text())
    assert message in sparsam("export", *arguments).err


def test_a_damaged_checkpoint_is_refused(sparsam, recipe):
    sparsam("train", recipe, "--out", "run", "--steps", 1)
    path = Path("run/checkpoints/step-00000001/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert "step-00000001: not a whole checkpoint" in sparsam("export", "run").err
