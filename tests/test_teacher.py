from __future__ import annotations

import math

import pytest
import torch

from sparsam.compress.distil import Distillation
from sparsam.recipe import parse_recipe
from sparsam.recipe.reading import RecipeError
from sparsam.teacher import counted_step, distillation_of, loss_of
from test_train import assert_equal, metrics_of, recipe_of, run_to, state_of, text

__all__ = ["text"]  # the fixture

BIGGER = ["model={layers: 2, width: 48, heads: 1}", "training.context=24"]


@pytest.fixture
def teacher(text, tmp_path):
    """The folder of a sparse teacher, larger than the student."""
    run_to(recipe_of(text, *BIGGER), tmp_path / "teacher", 3)
    return tmp_path / "teacher"


def test_a_resumed_run_with_a_teacher_is_the_uninterrupted_one_bit_for_bit(text, tmp_path, teacher):
    recipe = recipe_of(text, f"distillation={{teacher: {teacher}, weight: 1.0, temperature: 3.0}}")
    whole = run_to(recipe, tmp_path / "whole", 6)
    expected = state_of(whole)
    run_to(recipe, tmp_path / "parts", 3)
    torch.manual_seed(99)
    resumed = run_to(recipe, tmp_path / "parts", 6, resume=True)
    assert_equal(expected, state_of(resumed))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")
    steps = [record for record in metrics_of(tmp_path / "whole") if record["kind"] == "train"]
    assert all(record["distillation.logits"] > 0 for record in steps)
    # the student begins as it does alone, and goes on another way
    alone = run_to(recipe_of(text), tmp_path / "alone", 6)
    evaluated = [
        [record["loss"] for record in metrics_of(tmp_path / run) if record["kind"] == "eval"]
        for run in ("whole", "alone")
    ]
    assert evaluated[0][0] == evaluated[1][0]
    assert evaluated[0][-1] != evaluated[1][-1]
    assert whole.operations.computed > alone.operations.computed  # the teacher's forward is counted
    # and no checkpoint holds the teacher
    folders = [tmp_path / run / "checkpoints" / "step-00000006" / "model.safetensors" for run in ("whole", "alone")]
    assert folders[0].stat().st_size == folders[1].stat().st_size
    run_to(recipe_of(text, *BIGGER), teacher, 6, resume=True)
    with pytest.raises(ValueError, match="teacher: expected the one that this training began with"):
        run_to(recipe, tmp_path / "parts", 6, resume=True)


def test_a_model_folder_teaches_a_student_of_its_tokenizer(text, tmp_path, monkeypatch):
    import sparsam.teacher

    class Folder:
        context = 32

        def __init__(self, folder):
            self.folder = folder

        def tokenise(self, content):
            return torch.tensor([len(content) if self.folder.name == "other" else 7])

    monkeypatch.setattr(sparsam.teacher, "FolderModel", Folder)
    for name in ("own", "other", "same"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    recipe = recipe_of(text, f"model={tmp_path / 'own'}", f"distillation={{teacher: {tmp_path / 'other'}}}")
    with pytest.raises(ValueError, match="expected a teacher that reads the student's tokens"):
        distillation_of(recipe)
    monkeypatch.setattr(type(recipe), "build_model", lambda self: torch.nn.Linear(1, 1))
    recipe = recipe_of(text, f"model={tmp_path / 'own'}", f"distillation={{teacher: {tmp_path / 'same'}, weight: 2}}")
    found = distillation_of(recipe)
    assert isinstance(found, Distillation)
    assert (found.weights["logits"], found.temperature) == (2.0, 2.0)
    assert not found.teacher.training


def test_without_a_teacher_nothing_changes(text):
    recipe = recipe_of(text)
    assert distillation_of(recipe) is None
    model = recipe.build_model()
    batch = torch.zeros(2, 16, dtype=torch.int64)
    assert counted_step(model, batch, None).computed > 0
    assert math.isfinite(float(loss_of(model, type("B", (), {"inputs": batch, "targets": batch}), None).detach()))


def test_what_is_no_teacher_is_refused_in_one_line(text, tmp_path, teacher):
    (tmp_path / "untrained").mkdir()
    (tmp_path / "untrained" / "recipe.yaml").write_text((teacher / "recipe.yaml").read_text())
    for folder, message in [
        (tmp_path / "nowhere", "expected a run folder or a Hugging Face model folder, found nothing there in"),
        (text, "expected a run folder or a Hugging Face model folder, found neither in"),
        (tmp_path / "untrained", "expected a run with a checkpoint"),
    ]:
        with pytest.raises(ValueError, match=message):
            distillation_of(recipe_of(text, f"distillation={{teacher: {folder}}}"))
    with pytest.raises(ValueError, match="expected a teacher for 32 tokens, got one for 24"):
        distillation_of(recipe_of(text, "training.context=32", f"distillation={{teacher: {teacher}}}"))


def test_the_section_is_read_and_written():
    recipe = parse_recipe("version: 1\ndistillation: {teacher: some/run}")
    assert parse_recipe(recipe.yaml()) == recipe
    assert recipe.dense().distillation == recipe.distillation
    assert recipe.resolved().distillation.teacher.endswith("/some/run")
    assert recipe.resolved().distillation.teacher.startswith("/")
    for section, message in [
        ("{teacher: a, weight: 0}", r"distillation\.weight: expected more than 0, got 0|distillation\.weight: .*0"),
        ("{teacher: a, temprature: 1}", r"distillation\.temprature: .*temperature"),
        ("{weight: 1}", r"distillation\.teacher"),
    ]:
        with pytest.raises(RecipeError, match=message):
            parse_recipe(f"version: 1\ndistillation: {section}")
