from __future__ import annotations

import json
import math

import pytest
import torch

from sparsam import checkpoint, measure
from sparsam.recipe import Recipe, parse_recipe
from sparsam.run import Run, RunError
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
