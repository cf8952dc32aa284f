"""The section `memory`: what it reads, refuses and attaches."""

from __future__ import annotations

import pytest

from sparsam.memory.recompute import Recompute
from sparsam.recipe import parse_recipe
from sparsam.recipe.parts import parts_of
from sparsam.recipe.reading import RecipeError
from sparsam.session import Part


@pytest.mark.parametrize(
    ("text", "every", "selective"),
    [
        ("{recompute: 5}", 5, False),
        ("{}", 5, False),
        ("{recompute: 1, selective: true}", 1, True),
    ],
)
def test_the_section_attaches_a_recomputation_after_all_others(text, every, selective):
    recipe = parse_recipe(f"version: 1\nmemory: {text}")
    part = parts_of(recipe, None, Part(), False, None, None)[-1]
    assert isinstance(part, Recompute)
    assert (part.every, part.selective) == (every, selective)
    assert parse_recipe(recipe.yaml()) == recipe
    assert recipe.dense().memory == recipe.memory


def test_without_the_section_nothing_is_attached():
    parts = parts_of(parse_recipe("version: 1"), None, Part(), False, None, None)
    assert not any(isinstance(part, Recompute) for part in parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{recompute: 0}", r"memory\.recompute: expected at least 1, got 0\."),
        ("{recompte: 5}", r"memory\.recompte: .*recompute"),
        ("{layers: []}", r"memory\.layers: expected at least 1 in the list, got 0\."),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe(f"version: 1\nmemory: {text}")
