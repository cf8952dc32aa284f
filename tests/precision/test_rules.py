"""Formats by glob: who wins, what stays high by itself, and a rule that matches nothing."""

from __future__ import annotations

import pytest

from sparsam.kernels.formats import BF16, FP8, FP32, INT8, PRODUCTS
from sparsam.precision.policies import Evidence
from sparsam.precision.rules import Rules

LAYERS = ("blocks.0.attn.qkv", "blocks.0.attn.out", "blocks.0.up", "blocks.0.down", "head")


def units_of(*layers):
    return tuple(f"{layer}/{product}" for layer in layers for product in PRODUCTS)


def formats(policy, *layers):
    """Layer -> the formats of its three products, or the one that all have."""
    state = policy.start(units_of(*layers))
    found = {}
    for layer in layers:
        three = tuple(state[unit].format for unit in units_of(layer))
        found[layer] = three[0] if len(set(three)) == 1 else three
    return found


def test_without_rules_only_the_head_is_higher():
    assert formats(Rules(), *LAYERS) == dict.fromkeys(LAYERS, "bf16") | {"head": "fp32"}


def test_outputs_of_attention_have_no_less_than_16_bits():
    low = dict.fromkeys(LAYERS, "fp8")
    assert formats(Rules(low="fp8"), *LAYERS) == low | {"blocks.0.attn.out": "bf16", "head": "fp32"}
    assert formats(Rules(low="tf32"), *LAYERS)["blocks.0.attn.out"] == "tf32"
    assert formats(Rules(low=FP8, head=BF16), *LAYERS)["head"] == "bf16"


@pytest.mark.parametrize(
    ("layer", "beside", "high"),
    [
        ("layers.0.self_attn.out_proj", "fc", True),
        ("layers.0.self_attn.o_proj", "fc", True),
        ("o_proj", "fc", True),
        ("audio_proj", "fc", False),
        ("h.0.attn.c_proj", "fc", True),
        ("h.0.mlp.c_proj", "fc", False),
        ("blocks.0.attn.proj", "fc", True),
        ("layer.0.attention.output.dense", "fc", True),
        ("layer.0.output.dense", "fc", False),
        ("blocks.0.out", "blocks.0.qkv", True),
        ("out", "qkv", True),
        ("blocks.0.out", "blocks.1.qkv", False),
        ("layout", "layqkv", False),
    ],
)
def test_which_layers_are_outputs_of_attention(layer, beside, high):
    assert formats(Rules(low="int8"), beside, layer, "last")[layer] == ("bf16" if high else "int8")


def test_later_rules_win_and_win_over_defaults():
    rules = {"*": "bf16", "blocks.*": INT8, "*/weight_gradient": FP32, "blocks.0.up/weight_gradient": "bf16"}
    assert formats(Rules(rules, low="fp8"), *LAYERS) == {
        "blocks.0.attn.qkv": ("int8", "int8", "fp32"),
        "blocks.0.attn.out": ("int8", "int8", "fp32"),
        "blocks.0.up": ("int8", "int8", "bf16"),
        "blocks.0.down": ("int8", "int8", "fp32"),
        "head": ("bf16", "bf16", "fp32"),
    }


def test_a_glob_without_a_product_is_about_all_three_and_about_layers_alone():
    assert formats(Rules({"*up": "int8"}), *LAYERS)["blocks.0.up"] == "int8"
    with pytest.raises(ValueError, match="matches no layer"):
        Rules({"*gradient": "int8"}).start(units_of(*LAYERS))


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        ("blocks.0.upp", "rules: 'blocks.0.upp' matches no layer. Did you mean 'blocks.0.up'?"),
        ("xyz", "rules: 'xyz' matches no layer. There are: blocks.0.attn.qkv, blocks.0.attn.out, "),
        ("head/backward", "rules: 'head/backward' matches no product. Did you mean 'head/forward'?"),
        ("HEAD", "rules: 'HEAD' matches no layer."),
        ("*", None),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_and_a_default_is_not(glob, message):
    rules = Rules({glob: "fp32"})
    if message is None:
        rules.start(units_of("only"))
        return
    with pytest.raises(ValueError) as error:
        rules.start(units_of(*LAYERS))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_misspelt_format_is_refused_at_once():
    for arguments in ({"rules": {"*": "fp9"}}, {"low": "fp9"}, {"head": "fp9"}):
        with pytest.raises(ValueError, match=r"format: expected one of .*, got 'fp9'. Did you mean"):
            Rules(**arguments)


def test_the_formats_that_a_device_must_have():
    assert Rules().lowest == (BF16, FP32)
    assert Rules({"a": "fp8", "b": INT8}, head="bf16").lowest == (FP8, INT8, BF16)


def test_nothing_changes_with_steps():
    rules = Rules()
    state = rules.start(units_of(*LAYERS))
    assert rules.decide(state, Evidence(finite=False), 100) is state
    assert rules.sample_every == 0
    assert rules.start(()) == {}
