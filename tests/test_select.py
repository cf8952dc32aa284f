"""Globs over layer names: order kept, whole names, and a glob that matches nothing is never passed over."""

from __future__ import annotations

import pytest

from sparsam.select import select

NAMES = ["embed", "blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.1.mlp.fc1", "lm_head"]


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (["*"], [], NAMES),
        (["*"], ["*embed*", "lm_head"], NAMES[1:4]),
        (["blocks.*"], ["*.0.*"], ["blocks.1.mlp.fc1"]),
        (["*.fc1", "embed"], [], ["embed", "blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]),
        (["blocks.?.mlp.fc[12]"], [], ["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]),
        ([], [], []),
        (["*"], ["*"], []),
    ],
)
def test_what_is_left(include, exclude, left):
    assert select(NAMES, include, exclude) == left


def test_names_may_come_from_an_iterator_and_none_is_fine():
    assert select(iter(NAMES), ["lm_head"]) == ["lm_head"]
    assert select([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["blocks.0.mlp.fc3"],), "include: 'blocks.0.mlp.fc3' matches no layer. Did you mean 'blocks.0.mlp.fc1'?"),
        ((["*"], ["lm_haed"]), "exclude: 'lm_haed' matches no layer. Did you mean 'lm_head'?"),
        ((["*"], ["conv*"]), "There are: embed, blocks.0.attn.qkv, blocks.0.mlp.fc1, blocks.1.mlp.fc1, lm_head."),
        ((["LM_HEAD"],), "include: 'LM_HEAD' matches no layer."),
        (("*",), "include: expected a list of globs, got the string '*'. Write"),
        ((["*"], "embed"), "exclude: expected a list of globs, got the string 'embed'. Write"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        select(NAMES, *arguments)
    assert message in str(error.value)


def test_a_long_list_is_cut():
    with pytest.raises(ValueError, match=r"There are: .*layer4, \.\.\.\.$"):
        select([f"layer{number}" for number in range(9)], ["xyz"])
