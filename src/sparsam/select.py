"""Which modules or parameters are meant: include and exclude globs over their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

__all__ = ["nearest", "select"]


def select(names: Iterable[str], include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[str]:
    """Names that match a glob of `include` and none of `exclude`, in their own order.

    Args:
        names: dotted names.
        include: globs, matched case by case against whole names; `*` also matches dots.
        exclude: globs that take names away again.

    Raises:
        ValueError: a glob matches no name at all (a misspelt exclusion must not pass in silence), or one string is
            given where a list of globs is meant.
    """
    names = list(names)
    for what, globs in (("include", include), ("exclude", exclude)):
        if isinstance(globs, str):
            raise ValueError(f"{what}: expected a list of globs, got the string {globs!r}. Write [{globs!r}].")
        for glob in globs:
            if glob != "*" and not any(fnmatchcase(name, glob) for name in names):
                raise ValueError(f"{what}: {glob!r} matches no layer. {nearest(glob, names)}")
    return [
        name
        for name in names
        if any(fnmatchcase(name, glob) for glob in include) and not any(fnmatchcase(name, glob) for glob in exclude)
    ]


def nearest(glob: str, names: Sequence[str]) -> str:
    """The end of an error about a glob that matches nothing: the name that may be meant, or what there is."""
    near = difflib.get_close_matches(glob.strip("*"), names, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"There are: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
