"""The recipe: a YAML file that says all of a run, read once into typed objects that build what they name."""

from sparsam.recipe.reading import RecipeError, default_recipe, parse_recipe, read_recipe
from sparsam.recipe.sections import Recipe

__all__ = ["Recipe", "RecipeError", "default_recipe", "parse_recipe", "read_recipe"]
