from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sparsam.recipe import RecipeError, default_recipe, parse_recipe, read_recipe

# text below `version: 1` -> the one line that a person reads
REFUSED = {
    "unknown": ("sparsty: {}", "r.yaml: sparsty: there is no such key; did you mean 'sparsity'?"),
    "nested": ("sparsity: {densty: 0.1}", "r.yaml: sparsity.densty: there is no such key; did you mean 'density'?"),
    "deep": (
        "sparsity: {pattern: {row: 16}}",
        "r.yaml: sparsity.pattern.row: there is no such key; did you mean 'rows'?",
    ),
    "method": (
        "sparsity: {method: {type: set, evry: 5}}",
        "r.yaml: sparsity.method.evry: there is no such key; did you mean 'every'?",
    ),
    "model": ("model: {layer: 3}", "r.yaml: model.layer: there is no such key; did you mean 'layers'?"),
    "no near name": (
        "foo: 1",
        "r.yaml: foo: there is no such key; "
        "known are version, model, data, sparsity, optimizer, precision, compression, distillation, memory, "
        "training, twin.",
    ),
    "too large": ("sparsity: {density: 2.0}", "r.yaml: sparsity.density: expected at most 1, got 2.0."),
    "zero": ("sparsity: {density: 0.0}", "r.yaml: sparsity.density: expected greater than 0, got 0.0."),
    "text for number": ("sparsity: {density: '0.1'}", "r.yaml: sparsity.density: expected a number, got '0.1'."),
    "two": (
        "training: {steps: 0, batch: x}",
        "r.yaml: training.steps: expected at least 1, got 0; training.batch: expected a whole number, got 'x'.",
    ),
    "no section": ("model: 3", "r.yaml: model: expected a section with keys layers, width, heads, activation, got 3."),
    "choice": (
        "precision: b16",
        "r.yaml: precision: expected bf16 or fp32, got 'b16'; did you mean 'bf16'?",
    ),
    "pattern": (
        "sparsity: {pattern: {type: blok}}",
        "r.yaml: sparsity.pattern: expected block or unstructured or nm or neuron, got 'blok'; did you mean 'block'?",
    ),
    "list": ("sparsity: {exclude: head}", "r.yaml: sparsity.exclude: expected a list, got 'head'."),
    "betas": ("optimizer: {betas: [1, 2]}", "r.yaml: optimizer.betas: expected two numbers in [0, 1), got [1.0, 2.0]."),
    "heads": ("model: {width: 10}", "r.yaml: model: expected heads that divide width, got 8 heads for width 10."),
    "twice": (
        "twin: full\ntwin: none",
        "r.yaml: expected YAML, it does not parse: the key 'twin' is given twice (line 1).",
    ),
    # features that do not go together, and what this machine has not
    "dense with a twin": (
        "sparsity: null",
        "r.yaml: twin full needs sparsity or a policy of precision, without them a run has no twin; set twin: none.",
    ),
    "compact single weights": (
        "sparsity: {pattern: {type: unstructured}, storage: compact}",
        "r.yaml: sparsity: storage compact needs pattern block, got unstructured; use storage masked or pattern block.",
    ),
    "nothing to move": (
        "sparsity: {density: 1.0}",
        "r.yaml: sparsity: method rigl has nothing to move at density 1; use method static or a lower density.",
    ),
    "no such method": (
        "sparsity: {method: {type: grannet}}",
        "r.yaml: sparsity.method: expected static or set or rigl or drop_grow or gmp or granet or taylor_pruning or "
        "ac_dc or sr_ste or recovery or resize, got 'grannet'; did you mean 'granet'?",
    ),
    "no such score": (
        "sparsity: {method: {type: resize, keep: tailor}}",
        "r.yaml: sparsity.method.keep: expected magnitude or mest or gradient or taylor or fisher or movement or "
        "momentum or random, got 'tailor'; did you mean 'taylor'?",
    ),
    "no such allocation": (
        "sparsity: {allocation: globl}",
        "r.yaml: sparsity.allocation: expected uniform or erdos_renyi or global or by_sensitivity, got 'globl'; "
        "did you mean 'global'?",
    ),
    "no such schedule": (
        "sparsity: {method: {type: resize, schedule: {type: cosin}}}",
        "r.yaml: sparsity.method.schedule: expected cosine or cubic or linear or stages, got 'cosin'; "
        "did you mean 'cosine'?",
    ),
    "no such key of a schedule": (
        "sparsity: {method: {type: resize, schedule: {type: cubic, initail: 0.8}}}",
        "r.yaml: sparsity.method.schedule.initail: there is no such key; did you mean 'initial'?",
    ),
    "groups": (
        "sparsity: {pattern: {type: nm, n: 4, m: 4}}",
        "r.yaml: sparsity.pattern: expected n smaller than m, got 4:4.",
    ),
    "more than groups hold": (
        "sparsity: {pattern: {type: nm}, density: 0.6}",
        "r.yaml: sparsity: pattern nm holds 2 of 4, density 0.6 is more; use density 0.5.",
    ),
    "groups of other densities": (
        "sparsity: {pattern: {type: nm}, method: {type: gmp}}",
        "r.yaml: sparsity: pattern nm holds 2 of 4 or all, and method gmp passes through what is between; "
        "use method sr_ste, ac_dc, rigl, set or static.",
    ),
    "groups that are shared out": (
        "sparsity: {pattern: {type: nm}, allocation: erdos_renyi}",
        "r.yaml: sparsity: pattern nm has the same density in every layer, got allocation erdos_renyi; "
        "use allocation uniform.",
    ),
    "compact groups": (
        "sparsity: {pattern: {type: nm}, storage: compact}",
        "r.yaml: sparsity: storage compact needs pattern block, got nm; use storage masked or pattern block.",
    ),
    "compact and trained behind zeros": (
        "sparsity: {method: {type: sr_ste}, storage: compact}",
        "r.yaml: sparsity: storage compact does not go with method sr_ste: inactive weights go on training behind "
        "their zeros; use storage masked.",
    ),
    "compact and grown by what it has not": (
        "sparsity: {method: {type: drop_grow, grow: momentum}, storage: compact}",
        "r.yaml: sparsity: storage compact does not go with method drop_grow: it grows by momentum, which inactive "
        "weights have in masked storage only; use storage masked.",
    ),
    "compact and growing": (
        "sparsity: {method: {type: recovery}, storage: compact}",
        "r.yaml: sparsity: storage compact has no place for what method recovery grows; use storage auto or masked.",
    ),
    "compact and growing in stages": (
        "sparsity: {method: {type: resize, schedule: {initial: 0.05}}, storage: compact}",
        "r.yaml: sparsity: storage compact has no place for what method resize grows; use storage auto or masked.",
    ),
    "moments kept nowhere": (
        "sparsity: {keep_moments: true}",
        "r.yaml: sparsity: keep_moments needs masked storage, where a unit has a place of its own; "
        "use storage masked, or keep_moments false.",
    ),
    "nothing to prune": (
        "sparsity: {method: {type: gmp, initial: 0.1}}",
        "r.yaml: sparsity: method gmp begins at density 0.1, sparsity.density 0.1 is no less; "
        "use a lower density or method static.",
    ),
    "nothing to grow back": (
        "sparsity: {density: 1.0, method: {type: recovery}}",
        "r.yaml: sparsity: method recovery has nothing to grow back at density 1; use a lower density.",
    ),
    "too late": (
        "sparsity: {method: {type: taylor_pruning}}",
        "r.yaml: sparsity: method taylor_pruning, every 1000 steps, reaches density 0.1 at step 11000, after "
        "training.steps 500; use a smaller every or more steps.",
    ),
    "ends dense": (
        "sparsity: {method: {type: ac_dc, until: 1.0}}",
        "r.yaml: sparsity: method ac_dc begins its last sparse phase at step 500, training.steps is 500: the model "
        "would end dense; use shorter phases or a smaller until.",
    ),
    "begins after its end": (
        "sparsity: {method: {type: granet, begin: 0.8}}",
        "r.yaml: sparsity: method granet begins at 0.8 of the training and ends at 0.75: expected until later than "
        "begin, by a step at least of training.steps 500.",
    ),
    "recovers before it prunes": (
        "sparsity: {method: {type: recovery, prune: 0.4}}",
        "r.yaml: sparsity: method recovery prunes at 0.4 of the training, fine-tunes until 0.3 and grows until 0.8: "
        "expected rising shares, a step of training.steps 500 apart at least.",
    ),
    "ends elsewhere": (
        "sparsity: {method: {type: resize, schedule: {type: stages, values: [[0, 1.0], [0.5, 0.2]]}}}",
        "r.yaml: sparsity: method.schedule ends at density 0.2, sparsity.density is 0.1; make them equal.",
    ),
    "stages of no step": (
        "sparsity: {method: {type: resize, schedule: {type: stages, values: [[0, 1.0], [0.001, 0.1]]}}}",
        "r.yaml: sparsity: method.schedule has stages of less than one step of training.steps 500; "
        "leave some out or train longer.",
    ),
    "stages out of order": (
        "sparsity: {method: {type: resize, schedule: {type: stages, values: [[0.1, 1.0], [0.5, 0.1]]}}}",
        "r.yaml: sparsity.method.schedule.values: expected rising shares of the training that begin with 0, "
        "got [0.1, 0.5].",
    ),
    "stages of three": (
        "sparsity: {method: {type: resize, schedule: {type: stages, values: [[0, 1.0], [0.5, 0.1, 3]]}}}",
        "r.yaml: sparsity.method.schedule.values: expected pairs of a share of the training and a density, "
        "both up to 1, got [0.5, 0.1, 3.0].",
    ),
    "too slow": (
        "sparsity: {method: {type: resize, schedule: {limit_rate: 0.001}}}",
        "r.yaml: sparsity: method.schedule with limit_rate 0.001 comes to density 0.641 by step 375, short of "
        "sparsity.density 0.1; use a larger limit_rate or a later until.",
    ),
    "moved when": (
        "sparsity: {method: {type: resize, fraction: 0.1, schedule: {type: stages}}}",
        "r.yaml: sparsity: method.fraction moves units every so many steps; set method.every, or fraction 0.",
    ),
    "no such key of a penalty": (
        "sparsity: {l1: {strenth: 0.5}}",
        "r.yaml: sparsity.l1.strenth: there is no such key; did you mean 'strength'?",
    ),
    "gradients before the first step": (
        "sparsity: {allocation: by_sensitivity}",
        "r.yaml: sparsity: allocation.score taylor needs gradients, and method rigl shares density out before the "
        "first step; use score magnitude, or a method that changes density.",
    ),
    "fp8": (
        "precision: fp8",
        "r.yaml: precision: CPUs have no fast fp8 to train in; the usable precisions are bf16 and fp32, "
        "or a policy such as {type: adaptive}.",
    ),
    "muon": (
        "optimizer: {type: Muon}",
        "r.yaml: optimizer.type: Muon reads the shape of the weights, which blocks do not keep; use adamw.",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_and_how(text, message):
    with pytest.raises(RecipeError) as error:
        parse_recipe(f"version: 1\n{text}\n", name="r.yaml")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: expected sections like `training:` with keys below, got nothing."),
        ("- a", "r.yaml: expected sections like `training:` with keys below, got list."),
        ("twin: none", "r.yaml: expected `version: 1` in it, got none. Add the line."),
        ("version: one", "r.yaml: expected `version: 1` in it, got 'one'. Add the line."),
        (
            "version: 2\nnew_section: {}",
            "r.yaml: version 2 is newer than 1, the newest that this Sparsam reads. Upgrade Sparsam.",
        ),
    ],
)
def test_the_version_comes_first(text, message):
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, name="r.yaml")
    assert str(error.value) == message


def test_yaml_that_does_not_parse_is_one_line():
    with pytest.raises(
        RecipeError, match=r"^r\.yaml: expected YAML, it does not parse: .*line 1, column \d+.*\.$"
    ) as error:
        parse_recipe("version: [", name="r.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("small", [False, True])
def test_the_default_recipe_reads_and_survives_being_written(small):
    recipe = read_recipe(default_recipe(small))
    assert parse_recipe(recipe.yaml()) == recipe


def test_the_small_demo_is_the_demo_in_a_smaller_model():
    usual, small = read_recipe(default_recipe()), read_recipe(default_recipe(small=True))
    assert small.model.width == usual.model.width // 2
    assert small.training.steps < usual.training.steps
    settings = ["model.width=512", "model.heads=8", "training.steps=220"]
    assert read_recipe(default_recipe(small=True), settings) == usual


def test_settings_change_a_recipe():
    recipe = parse_recipe(
        "version: 1",
        ["sparsity.density=0.2", "sparsity.method.every=7", "optimizer.lr=1e-4", "twin=none", "data.path=a b"],
    )
    assert recipe.sparsity is not None
    assert (recipe.sparsity.density, recipe.optimizer.lr, recipe.twin, recipe.data.path) == (0.2, 1e-4, "none", "a b")
    assert recipe.sparsity.method.build(100).every == 7
    assert parse_recipe("version: 1\nsparsity: {density: 0.2}", ["sparsity=null", "twin=none"]).sparsity is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("x", "--set x: expected section.key=value, e.g. --set sparsity.density=0.2."),
        ("a..b=1", "--set a..b=1: expected section.key=value, e.g. --set sparsity.density=0.2."),
        (
            "model.layers=2",
            "--set model.layers=2: expected 'model' to be a section, it is 'folder'. Set 'model' itself.",
        ),
        ("twin=ful", "recipe: twin: expected none or sampled or full, got 'ful'; did you mean 'full'?"),
        ("sparsity.densty=1", "recipe: sparsity.densty: there is no such key; did you mean 'density'?"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(RecipeError) as error:
        parse_recipe("version: 1\nmodel: folder", [setting])
    assert str(error.value) == message


def test_a_setting_that_does_not_parse():
    with pytest.raises(RecipeError, match=r"^--set twin=\[: expected a YAML value after '=', it does not parse: .*\.$"):
        parse_recipe("version: 1", ["twin=["])


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.0e-3", "+1e-3"])
def test_numbers_as_people_write_them(text):
    assert parse_recipe(f"version: 1\noptimizer: {{lr: {text}}}").optimizer.lr == 0.001


def test_an_optimizer_as_papers_write_it():
    text = "version: 1\noptimizer: {type: AdamW, lr: 6e-5, weight_decay: 0.01, betas: [0.9, 0.999]}"
    optimizer = parse_recipe(text).optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay, optimizer.betas) == (
        "adamw",
        6e-5,
        0.01,
        [0.9, 0.999],
    )
    assert parse_recipe("version: 1", ["optimizer.lr=6e-5"]).optimizer.lr == 6e-5


def test_a_type_is_read_in_any_case():
    sparsity = parse_recipe("version: 1\nsparsity: {pattern: {type: Block}, method: {type: RigL, every: 7}}").sparsity
    assert (sparsity.pattern.type, sparsity.method.type, sparsity.method.every) == ("block", "rigl", 7)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"x\.yaml: expected a recipe \(a YAML file\), found nothing there\."):
        read_recipe(tmp_path / "x.yaml")
    with pytest.raises(RecipeError, match=r"got a folder\. A run folder is taken up with --resume\."):
        read_recipe(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"b\.yaml: expected a recipe \(a YAML file\), it cannot be read"):
        read_recipe(tmp_path / "b.yaml")


def test_the_page_lists_every_key_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()
    text, *others = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert yaml.safe_load(text) == yaml.safe_load(parse_recipe("version: 1").yaml())
    for other in others:
        parse_recipe(f"version: 1\n{other}")
