"""The section `precision`: what it builds, what it refuses on this machine, and the promised recipe as it stands."""

from __future__ import annotations

import pytest

from sparsam.kernels.formats import BF16, FP8, FP16, FP32, INT8
from sparsam.precision.adaptive import Adaptive
from sparsam.precision.progressive import Progressive
from sparsam.precision.rules import Rules
from sparsam.precision.scaler import LossScaler
from sparsam.recipe import RecipeError, parse_recipe

PROMISED = """
version: 1
optimizer: {type: AdamW, lr: 6e-5, weight_decay: 0.01, betas: [0.9, 0.999]}
precision: {initial: fp16, final: fp8, transition_steps: 8000, grad_scaling: adaptive}
"""


def section(text):
    return parse_recipe(f"version: 1\nprecision: {text}\n").precision


def test_the_promised_recipe_stops_on_a_cpu_with_one_line():
    with pytest.raises(RecipeError) as error:
        parse_recipe(PROMISED, name="r.yaml")
    assert str(error.value) == (
        "r.yaml: precision: fp8: this CPU has no fast fp8 product. "
        "Use bf16, or say simulate: true for its numbers at no gain in speed."
    )


def test_the_promised_recipe_is_read_as_it_stands_when_it_may_simulate():
    recipe = parse_recipe(PROMISED, ["precision.simulate=true"])
    assert (recipe.optimizer.type, recipe.optimizer.lr, recipe.optimizer.betas) == ("adamw", 6e-5, [0.9, 0.999])
    policy = recipe.precision.policy(steps=20_000, warm_up=recipe.optimizer.warm_up)
    assert isinstance(policy, Progressive)
    assert (policy.initial, policy.final, policy.transition_steps, policy.begin) == (FP16, FP8, 8000, 2000)
    [scaler] = recipe.precision.scaler()
    assert isinstance(scaler, LossScaler)
    assert parse_recipe(recipe.yaml()) == recipe
    assert recipe.dense().precision == "bf16"


def test_adaptive_has_the_defaults_of_its_policy():
    policy = section("{type: Adaptive}").policy(100, 0.1)
    assert policy == Adaptive()
    assert (policy.initial, policy.candidates) == (FP32, (BF16, INT8))
    given = section("{type: adaptive, initial: bf16, candidates: [int8], sample_every: 64, cooldown: 0.9}")
    assert given.policy(100, 0.1) == Adaptive(BF16, (INT8,), sample_every=64, cooldown_at=90)
    assert given.scaler() == []


def test_rules_are_passed_on():
    policy = section("{type: rules, low: bf16, head: bf16, rules: {'*.up/forward': int8}}").policy(100, 0.1)
    assert isinstance(policy, Rules)
    assert (policy.low, policy.head, policy.rules) == (BF16, BF16, {"*.up/forward": INT8})


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "misspelt": (
            "precision: {type: adaptiv}",
            "r.yaml: precision: expected rules or progressive or adaptive, got 'adaptiv'; did you mean 'adaptive'?",
        ),
        "no such format": (
            "precision: {type: rules, low: bf61}",
            "r.yaml: precision: format: expected one of fp32, tf32, bf16, fp16, fp8, fp8_rows, mx_fp8, int8, "
            "got 'bf61'. Did you mean 'bf16'?",
        ),
        "no such key": (
            "precision: {type: adaptive, sample_evry: 3}",
            "r.yaml: precision.sample_evry: there is no such key; did you mean 'sample_every'?",
        ),
        "no candidates": (
            "precision: {type: adaptive, candidates: []}",
            "r.yaml: precision.candidates: expected at least 1 in the list, got 0.",
        ),
        "compiled": (
            "precision: {type: adaptive}\ntraining: {compile: true}",
            "r.yaml: precision adaptive compiles anew at every switch of a format; "
            "set training.compile: false, or precision: bf16.",
        ),
        "fp16": (
            "precision: fp16",
            "r.yaml: precision: CPUs have no fast fp16 to train in; the usable precisions are bf16 and fp32, "
            "or a policy such as {type: adaptive}.",
        ),
    }.values(),
    ids=["misspelt", "no such format", "no such key", "no candidates", "compiled", "fp16"],
)
def test_what_is_refused_and_how(text, message):
    with pytest.raises(RecipeError) as error:
        parse_recipe(f"version: 1\n{text}\n", name="r.yaml")
    assert str(error.value) == message


def test_a_policy_may_have_a_twin_without_sparsity_and_that_is_plain():
    recipe = parse_recipe("version: 1\nsparsity: null\nprecision: {type: adaptive}\n")
    assert recipe.twin == "full"
    assert recipe.dense().precision == "bf16"
