from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from sparsam import checkpoint, measure
from sparsam.recipe import Recipe, parse_recipe
from sparsam.run import Run, RunError
from sparsam.sparse.layers import SparseLinear
from sparsam.train import Interrupted, Training, train

TINY = """
version: 1
model: {layers: 1, width: 32, heads: 1}
sparsity:
  pattern: {type: block, rows: 8, cols: 8}
  density: 0.25
  method: {type: rigl, every: 2, until: 1.0}
  if_slow: compact
training: {steps: 6, batch: 2, context: 16, evaluate_every: 3, evaluate_windows: 4, checkpoint_every: 3}
twin: none
"""


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"line {number} of a small text, over and over\n" * 20)
    return folder


def recipe_of(text, *settings) -> Recipe:
    return parse_recipe(TINY, [f"data.path={text}", *settings])


def never() -> bool:
    return False


def quiet(*_) -> None:
    pass


def fail(note) -> None:
    pytest.fail(f"unexpected note: {note}")


def run_to(recipe, folder, step, *, stop=never, resume=False):
    with Run.open(folder) if resume else Run.create(folder, recipe.yaml()) as run:
        training = Training(recipe, run, fail)
        training.advance(step, quiet, stop)
        return training


def state_of(training):
    return {
        "model": dict(training.model.state_dict()),
        "optimizer": checkpoint.optimizer_state(training.model, training.optimizer),
        "session": training.session.state_dict(),
        "data": training.batches.state_dict(),
        "torch": torch.get_rng_state(),
    }


def assert_equal(a, b, path="state"):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for place, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, two, f"{path}[{place}]")
    else:
        assert a == b, path


def metrics_of(folder):
    clocks = ("step_ms", "tokens_per_second", "seconds", "profiled_ms")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in clocks} for line in lines]


VARIANTS = {
    "rigl": [],
    "set in fp32": ["sparsity.method.type=set", "precision=fp32"],
    "static": ["sparsity.method={type: static}"],
    "masked": ["sparsity.pattern={type: unstructured}"],
    "masked blocks": ["sparsity.storage=masked"],
    "accumulated": ["training.accumulate=3"],
    "scattered": ["sparsity.if_slow=scatter"],
    "dense": ["sparsity=null"],
    "formats that go down": [
        "sparsity=null",
        "precision={initial: bf16, final: int8, transition_steps: 4, grad_scaling: adaptive}",
    ],
    "formats by statistics": ["precision={type: adaptive, sample_every: 1}", "sparsity.exclude=['*up']"],
    "simulated formats of sparse layers": ["precision={type: rules, low: fp8, simulate: true}"],
    "compact before the checkpoint": ["sparsity.method={type: gmp, every: 1, until: 0.34}"],
    "compact at the checkpoint": ["sparsity.method={type: gmp, every: 1, until: 0.5}"],
    "compact after the checkpoint": ["sparsity.method={type: granet, every: 2, until: 0.67}"],
    "compact and scattered": [
        "sparsity.method={type: taylor_pruning, every: 1, worst: 0.5, order: 1}",
        "sparsity.if_slow=scatter",
    ],
    "dead slots that go": [
        "sparsity.method={type: resize, every: 1, keep: movement, fraction: 0.3}",
        "sparsity.method.schedule={initial: 0.5, until: 0.34}",
        "sparsity.storage=compact",
        "sparsity.allocation=global",
    ],
    "moments kept while masked": [
        "sparsity.method={type: ac_dc, dense_steps: 1, sparse_steps: 1, until: 0.67}",
        "sparsity.keep_moments=true",
    ],
    "recovery": ["sparsity.method={type: recovery, prune: 0.2, fine_tune: 0.4, every: 1, regrow: 0.1}"],
    "pulled to zero and pruned": [
        "sparsity.method={type: resize, schedule: {type: stages, values: [[0.0, 1.0], [0.67, 0.25]]}}",
        "sparsity.l1={strength: 1e-3, until: 0.67, groups: true, dense: [head]}",
    ],
    "straight through": ["sparsity.pattern={type: nm}", "sparsity.density=0.5", "sparsity.method={type: sr_ste}"],
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(text, tmp_path, settings):
    recipe = recipe_of(text, *settings)
    whole = run_to(recipe, tmp_path / "whole", 6)
    expected = state_of(whole)
    run_to(recipe, tmp_path / "parts", 3)
    torch.manual_seed(99)  # another process would stand elsewhere
    resumed = run_to(recipe, tmp_path / "parts", 6, resume=True)
    assert_equal(expected, state_of(resumed))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


def test_a_run_killed_between_checkpoints_repeats_its_steps(text, tmp_path):
    recipe = recipe_of(text)
    expected = state_of(run_to(recipe, tmp_path / "whole", 6))
    run_to(recipe, tmp_path / "parts", 5)  # step 3 is saved, 4 and 5 are lost
    resumed = run_to(recipe, tmp_path / "parts", 6, resume=True)
    assert_equal(expected, state_of(resumed))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")


def test_stopping_saves_the_very_step(text, tmp_path):
    recipe = recipe_of(text)
    expected = state_of(run_to(recipe, tmp_path / "whole", 6))
    with pytest.raises(Interrupted):
        run_to(recipe, tmp_path / "parts", 6, stop=iter([False, False, False, True]).__next__)
    with Run.open(tmp_path / "parts") as run:
        training = Training(recipe, run, fail)
        assert training.step == 4
        training.advance(6, quiet, never)
    assert_equal(expected, state_of(training))


def test_what_a_run_leaves(text, tmp_path):
    recipe = recipe_of(text)
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        training = Training(recipe, run, fail)
        training.advance(0, quiet, never)  # as the twin is told to at first
        train(training, quiet, never)
        summary = run.read("summary.json")
        records = list(run.records())
        layers = run.read("layers.json")
        assert run.read("environment.json")["torch"] == torch.__version__
        assert run.read("profile.json")["linear"]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if record["kind"] == "eval"] == [0, 3, 6]
    assert [record["step"] for record in records if record["kind"] == "rewire"] == [2, 4]  # at 6 the share is 0
    evaluated = [record["loss"] for record in records if record["kind"] == "eval"]
    assert evaluated[0] == pytest.approx(math.log(256), abs=0.3)
    assert evaluated[-1] < evaluated[0]
    assert all(record["step_ms"] > 0 and record["sparsity"] == 0.75 for record in records if record["kind"] == "train")
    assert layers["density"] == 0.25
    figures = summary["figures"]
    moved = [record["grown"] / record["active"] for record in records if record["kind"] == "rewire"]
    assert figures["moved_share"] == {"value": pytest.approx(sum(moved) / 2), "unit": "share", "kind": "measured"}
    assert 0.25 < figures["ever_active"]["value"] <= 0.5
    assert all(set(figure) == {"value", "unit", "kind"} for figure in figures.values())
    assert figures["validation_loss"]["value"] == evaluated[-1]
    assert figures["validation_loss"]["kind"] == "measured"
    assert figures["flops_per_step"]["kind"] == "modelled"
    assert figures["flops_per_step"]["value"] < figures["flops_per_step_dense"]["value"]
    assert figures["training_bytes"]["value"] == sum(
        figures[name]["value"] for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    )
    assert set(summary["phases"]) == {"data", "forward", "backward", "optimiser and rewiring"}


def test_one_step_in_the_middle_is_taken_apart(text, tmp_path):
    recipe = recipe_of(text, "training.steps=10")
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        train(Training(recipe, run, fail), quiet, never)
        parts = run.read("summary.json")["breakdown"]
        steps = [record["step"] for record in run.records() if record["kind"] == "train"]
    assert "block-sparse products" in parts
    assert all(part["unit"] == "ms" for part in parts.values())
    assert steps == list(range(1, 11))


def test_the_profiled_step_keeps_its_time_apart(text, tmp_path):
    recipe = recipe_of(text, "training.steps=10", "sparsity.method.every=6")
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        training = Training(recipe, run, fail)
        train(training, quiet, never)
        records = list(run.records())
        phases = {name: len(times) for name, times in training._phases.items()}
    [profiled] = [record for record in records if record.get("profiled")]
    assert profiled["step"] == 6
    assert profiled["profiled_ms"] > 0
    assert not {"step_ms", "tokens_per_second"} & profiled.keys()
    times = [record["step_ms"] for record in records if record["kind"] == "train" and "step_ms" in record]
    assert training.seconds == pytest.approx(sum(times) / 1e3)
    assert set(phases.values()) == {9}
    [rewire] = [record for record in records if record["kind"] == "rewire"]
    assert rewire["step"] == 6
    assert 0 < rewire["grown"] <= rewire["active"]


def test_a_finished_run_keeps_its_summary(text, tmp_path):
    recipe = recipe_of(text)
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        train(Training(recipe, run, fail), quiet, never)
        summary = run.read("summary.json")
    with Run.open(tmp_path / "run") as run:
        train(Training(recipe, run, fail), quiet, never)
        assert run.read("summary.json") == summary
        (run.folder / "summary.json").unlink()
        train(Training(recipe, run, fail), quiet, never)
        assert run.read("summary.json").keys() == summary.keys()


def test_a_damaged_summary_is_one_line(text, tmp_path):
    recipe = recipe_of(text)
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        train(Training(recipe, run, fail), quiet, never)
        (run.folder / "summary.json").write_text("{")
        with pytest.raises(
            RunError, match=r"summary\.json: expected JSON, the file is damaged\. Remove it, then go on"
        ):
            train(Training(recipe, run, fail), quiet, never)


def test_the_peak_is_the_largest_of_all_resumes(text, tmp_path, monkeypatch):
    recipe = recipe_of(text)
    monkeypatch.setattr("sparsam.measure.peak_rss_bytes", lambda: 3000)
    run_to(recipe, tmp_path / "run", 3)
    monkeypatch.setattr("sparsam.measure.peak_rss_bytes", lambda: 2000)
    with Run.open(tmp_path / "run") as run:
        train(Training(recipe, run, fail), quiet, never)
        assert run.read("summary.json")["figures"]["peak_rss_bytes"]["value"] == 3000
        assert run.read("summary.json")["notes"] == []


def test_a_peak_that_cannot_be_reset_says_so(text, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsam.measure.reset_peak_rss", lambda: False)
    recipe = recipe_of(text)
    run_to(recipe, tmp_path / "run", 3)
    monkeypatch.undo()
    with Run.open(tmp_path / "run") as run:
        train(Training(recipe, run, fail), quiet, never)
        [note] = run.read("summary.json")["notes"]
    assert note.startswith("the peak of memory counts from the start of the process")


def test_operations_are_counted_on_the_path_that_trained(text, tmp_path):
    flops = {}
    for precision in ("bf16", "fp32"):
        recipe = recipe_of(text, f"precision={precision}", "training.context=64", "training.accumulate=2")
        with Run.create(tmp_path / precision, recipe.yaml()) as run:
            training = Training(recipe, run, fail)
            train(training, quiet, never)
            flops[precision] = run.read("summary.json")["figures"]["flops_per_step"]["value"]
            with training.session.forward():
                counted = measure.training_step(training.model, training.batches.next().inputs)
        assert flops[precision] == 2 * counted.computed


def test_the_twin_sees_the_same_batches_and_begins_alike(text, tmp_path):
    recipe = recipe_of(text)
    seen = {}
    for name, one in (("sparse", recipe), ("dense", recipe.dense())):
        with Run.create(tmp_path / name, one.yaml()) as run:
            training = Training(one, run, fail)
            seen[name] = (
                [training.batches.next().inputs for _ in range(5)],
                training.model.state_dict()["tokens.weight"],
            )
    assert all(map(torch.equal, seen["sparse"][0], seen["dense"][0]))
    assert torch.equal(seen["sparse"][1], seen["dense"][1])


def test_the_twin_is_called_in_turns(text, tmp_path):
    class Twin:
        def __init__(self):
            self.calls = []

        def advance(self, step):
            self.calls.append(step)

    for mode, calls in (("full", [0, 3, 6, 8]), ("sampled", list(range(9)))):
        recipe = recipe_of(text, "training.steps=8", f"twin={mode}")
        twin = Twin()
        with Run.create(tmp_path / mode, recipe.yaml()) as run:
            train(Training(recipe, run, fail), quiet, never, twin)
        assert twin.calls == calls


def test_a_text_that_has_changed_is_refused(text, tmp_path):
    recipe = recipe_of(text)
    run_to(recipe, tmp_path / "run", 3)
    (text / "1.txt").write_text("something else\n" * 30)
    with pytest.raises(RunError, match=r"expected the text that this run began with \(text\), it has changed since\."):
        run_to(recipe, tmp_path / "run", 6, resume=True)


@pytest.mark.parametrize("damage", ["none", "damaged", "missing"])
def test_a_resume_never_times_again(text, tmp_path, monkeypatch, damage):
    recipe = recipe_of(text)
    run_to(recipe, tmp_path / "run", 3)

    def refuse(*args, **options):
        pytest.fail("timed a layer again")

    monkeypatch.setattr("sparsam.measure.device_profile.time_linear", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    if damage == "damaged":
        (tmp_path / "run" / "profile.json").write_text("{")
    if damage == "missing":
        (tmp_path / "run" / "profile.json").unlink()
    run_to(recipe, tmp_path / "run", 6, resume=True)
    assert json.loads((tmp_path / "run" / "profile.json").read_text())["linear"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["optimizer.clip=null"],
            r"stopped after step 0, the loss is nan\. Start anew with a lower optimizer\.lr, or set",
        ),
        ([], r"stopped after step 0, 20 steps in a row had gradients that are not finite\. Start anew with a lower"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, settings, message):
    recipe = recipe_of(text, *settings)
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        training = Training(recipe, run, fail)
        with torch.no_grad():
            training.model.norm.weight.fill_(math.nan)
        with pytest.raises(RunError, match=message):
            training.advance(6, quiet, never)


def test_a_full_disk_in_the_middle_loses_nothing_that_was_saved(text, tmp_path, monkeypatch):
    recipe = recipe_of(text)
    expected = state_of(run_to(recipe, tmp_path / "whole", 6))
    write = checkpoint._write_file

    def full(path, chunks):
        if "step-00000006" in str(path) and path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(checkpoint, "_write_file", full)
    with pytest.raises(
        RunError, match=r"step 6 is not written: no space .* The checkpoint of step 3 is whole; then go on"
    ):
        run_to(recipe, tmp_path / "parts", 6)
    monkeypatch.undo()
    assert_equal(expected, state_of(run_to(recipe, tmp_path / "parts", 6, resume=True)))


def test_globs_that_match_nothing(text, tmp_path):
    recipe = recipe_of(text, "sparsity.exclude=['blocks.*.upp']")
    with Run.create(tmp_path / "run", recipe.yaml()) as run, pytest.raises(ValueError, match=r"blocks\.\*\.upp"):
        Training(recipe, run, fail)


def test_other_threads_are_said(text, tmp_path):
    recipe = recipe_of(text)
    run_to(recipe, tmp_path / "run", 3)
    before = torch.get_num_threads()
    notes = []
    with Run.open(tmp_path / "run") as run:
        Training(parse_recipe(recipe.yaml(), [f"training.threads={before + 1}"]), run, notes.append)
    assert notes == [f"This goes on from step 3, but not bit for bit: threads {before} then, {before + 1} now."]


GRADUAL = "sparsity.method={type: resize, every: 1, keep: taylor, schedule: {type: linear, until: 0.5}}"


def finished(recipe, folder):
    with Run.create(folder, recipe.yaml()) as run:
        training = Training(recipe, run, fail)
        train(training, quiet, never)
        return training, list(run.records()), run.read("summary.json"), run.read("layers.json")


def test_blocks_of_a_gradual_method_become_compact_once(text, tmp_path):
    training, records, summary, layers = finished(recipe_of(text, GRADUAL), tmp_path / "run")
    assert [
        (record["step"], record["layers"], record["masked"]) for record in records if record["kind"] == "compact"
    ] == [(3, 4, 0)]
    densities = {record["step"]: record["density"] for record in records if record["kind"] == "train"}
    assert [densities[step] for step in (1, 2, 3, 6)] == pytest.approx([0.75, 0.5, 0.25, 0.25], abs=0.01)
    assert all(
        record["density"] == pytest.approx(1 - record["sparsity"]) for record in records if record["kind"] == "train"
    )
    layer = training.model.blocks[0].up
    assert isinstance(layer, SparseLinear)
    assert len(layer.values) == int(layer.topology.sum())
    assert layers["density"] == pytest.approx(0.25, abs=0.01)
    rows = [row for row in layers["rows"] if row["units"]]
    assert {row["storage"] for row in rows} == {"compact"}
    assert all(row["reason"].startswith("masked at first") and row["compact_ms"] > 0 for row in rows)
    speeds = [r["tokens_per_second"] for r in records if r["kind"] == "train" and r["step"] > 3]
    assert summary["figures"]["tokens_per_second_compact"]["value"] == sorted(speeds)[1]
    assert summary["figures"]["ever_active"]["value"] == 1.0
    assert "moved_share" not in summary["figures"]  # nothing grew
    held = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in training.model.parameters()}


def test_blocks_that_were_compact_from_the_start_lose_their_dead_slots(text, tmp_path):
    recipe = recipe_of(text, GRADUAL, "sparsity.storage=compact")
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        training = Training(recipe, run, fail)
        layer = training.model.blocks[0].up
        training.advance(2, quiet, never)
        assert training.model.blocks[0].up is layer
        assert int((layer.block_row < 0).sum()) == 32
        train(training, quiet, never)
        [record] = [record for record in run.records() if record["kind"] == "compact"]
        assert "tokens_per_second_compact" not in run.read("summary.json")["figures"]
    assert (record["step"], record["layers"], record["masked"]) == (3, 0, 0)
    assert len(training.model.blocks[0].up.values) == 16


def test_operations_of_a_training_are_added_up_step_by_step(text, tmp_path):
    """Masked zeros are multiplied; blocks that left compact storage, dead slots included, are not."""
    _, _, summary, _ = finished(recipe_of(text, "sparsity=null", "training.accumulate=2"), tmp_path / "dense")
    per_step = summary["figures"]["flops_per_step"]["value"]
    assert summary["figures"]["training_flops"]["value"] == pytest.approx(6 * per_step)
    linear = (
        3 * 2 * 2 * 2 * 16 * 32 * 32 * 12
    )  # passes, multiply and add, micro-batches, rows, tokens, K x N of 4 layers
    # each step is counted at the density that it computed with, that of the step before its update
    for storage, densities in (("auto", [1, 1, 1, 0.25, 0.25, 0.25]), ("compact", [1, 0.75, 0.5, 0.25, 0.25, 0.25])):
        recipe = recipe_of(text, GRADUAL, "training.accumulate=2", f"sparsity.storage={storage}")
        _, _, summary, _ = finished(recipe, tmp_path / storage)
        figures = summary["figures"]
        saved = sum(linear * (1 - density) for density in densities)
        assert figures["training_flops"]["kind"] == "modelled"
        assert figures["training_flops"]["value"] == pytest.approx(6 * per_step - saved, rel=1e-3)
        paper = sum(linear * (1 - density) for density in [1, 0.75, 0.5, 0.25, 0.25, 0.25])
        assert figures["training_flops_on_paper"]["value"] == pytest.approx(6 * per_step - paper, rel=1e-3)


def test_what_measures_slower_stays_masked(text, tmp_path, monkeypatch):
    def timed(shape):
        return (2.0, 1.0) if shape.out_features == 96 else (1.0, 2.0)

    monkeypatch.setattr("sparsam.measure.device_profile.time_linear", timed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = recipe_of(text, GRADUAL, "sparsity.if_slow=dense")
    training, records, _, layers = finished(recipe, tmp_path / "run")
    rows = {row["name"]: row for row in layers["rows"]}
    assert rows["blocks.0.qkv"]["storage"] == "masked"
    assert rows["blocks.0.qkv"]["reason"] == "compact measured slower: stays masked"
    assert rows["blocks.0.qkv"]["density"] == pytest.approx(0.25, abs=0.01)
    assert rows["blocks.0.up"]["reason"] == "masked at first, then compact: 2.0x faster than dense"
    [compacted] = [record for record in records if record["kind"] == "compact"]
    assert (compacted["layers"], compacted["masked"]) == (3, 1)
    training.save()
    with Run.open(tmp_path / "run") as run:
        again = Training(recipe, run, fail)
        assert run.read("layers.json") == layers
        assert [type(module) for module in again.model.modules()] == [type(m) for m in training.model.modules()]


def test_a_masked_recipe_stays_masked_and_its_table_follows(text, tmp_path):
    _, records, _, layers = finished(recipe_of(text, GRADUAL, "sparsity.storage=masked"), tmp_path / "run")
    assert not [record for record in records if record["kind"] == "compact"]
    assert layers["density"] == pytest.approx(0.25, abs=0.01)
    assert {row["storage"] for row in layers["rows"] if row["units"]} == {"masked"}


def test_a_run_of_before_operations_were_counted_says_nothing_of_them(text, tmp_path):
    recipe = recipe_of(text)
    run_to(recipe, tmp_path / "run", 3)
    with Run.open(tmp_path / "run") as run:
        step, state = run.load(fail)
        del state["run"]["operations"], state["run"]["compact"]
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
        run.save(step, state)
        train(Training(recipe, run, fail), quiet, never)
        assert "training_flops" not in run.read("summary.json")["figures"]


def test_evaluations_say_how_often_the_next_token_is_right(text, tmp_path):
    _, records, summary, _ = finished(recipe_of(text), tmp_path / "run")
    shares = [record["accuracy"] for record in records if record["kind"] == "eval"]
    assert all(0 <= share <= 1 for share in shares)
    assert summary["figures"]["accuracy"] == {"value": shares[-1], "unit": "share", "kind": "measured"}
