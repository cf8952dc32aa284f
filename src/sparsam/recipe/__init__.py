"""The recipe: a YAML file that says all of a run, read once into typed objects that build what they name."""

from sparsam.recipe.reading import RecipeError, default_recipe, parse_recipe, read_recipe
from sparsam.recipe.sections import Recipe
from sparsam.recipe.sparsity import ALL_SLOW, all_slow

__all__ = ["ALL_SLOW", "Recipe", "RecipeError", "all_slow", "default_recipe", "parse_recipe", "read_recipe"]
