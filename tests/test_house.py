"""The layout of the house: who may import whom, how long a file may be, and what a file must say about itself."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparsam"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".cpp", ".h", ".inc"})

# Imports go downwards only; a new part of the package gets its place here.
LAYERS = (
    {"select", "schedules", "formats", "session", "rate", "kernels", "measure", "shards", "strict_yaml", "window"},
    {"sparse", "precision", "comm", "memory"},
    {"compress", "deploy", "report", "plan", "tasks"},
    {
        "integrations",
        "recipe",
        "checkpoint",
        "launch",
        "ranks",
        "record",
        "replicas",
        "run",
        "shard_checkpoint",
        "stored_model",
        "summary",
        "teacher",
        "train",
        "twin",
    },
    {"cli", "__main__"},
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
NEIGHBOURS = LAYERS[1]  # meet in session and kernels, never import each other
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
MAX_LINES = 420


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """The part of the house a file belongs to: its folder, or its own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path, tree: ast.Module, parts: set[str]) -> Iterator[tuple[str, int]]:
    """Parts of the package that a file imports, lazily or not, with line numbers; "" is the package itself."""
    package = ["sparsam", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names = alias.name.split(".")
                if names[0] == "sparsam":
                    yield names[1] if len(names) > 1 else "", node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = base + (node.module.split(".") if node.module else [])
            if names[:1] != ["sparsam"]:
                continue
            if len(names) > 1:
                yield names[1], node.lineno
            else:
                for alias in node.names:
                    yield alias.name if alias.name in parts else "", node.lineno


def broken_rules(path: Path, source: str, parts: set[str]) -> list[str]:
    """What a file imports against the rule of the layers, one line each."""
    own, faults = part_of(path), []
    if own not in LAYER_OF:
        return [f"{name_of(path)}: {own!r} has no place in LAYERS"]
    for part, line in imported_parts(path, ast.parse(source), parts):
        where = f"{name_of(path)}:{line}"
        if part == "":
            if LAYER_OF[own] == len(LAYERS) - 1:
                continue  # the command line is a user of the package like any other
            faults.append(f"{where}: imports the public face of the package; import from the part that owns the name")
        elif part not in LAYER_OF:
            faults.append(f"{where}: imports {part!r}, which has no place in LAYERS")
        elif LAYER_OF[part] > LAYER_OF[own]:
            faults.append(f"{where}: {own} imports {part}, which stands above it")
        elif part != own and part in NEIGHBOURS and own in NEIGHBOURS:
            faults.append(f"{where}: {own} imports its neighbour {part}; they meet in session and kernels")
    return faults


def test_imports_go_downwards():
    parts = {part_of(path) for path in MODULES}
    faults = [
        fault
        for path in MODULES
        if path != PACKAGE / "__init__.py"
        for fault in broken_rules(path, path.read_text(), parts)
    ]
    assert not faults, "\n".join(faults)


def test_parts_do_not_import_each_other_in_a_circle():
    parts = {part_of(path) for path in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        if path != PACKAGE / "__init__.py":
            seen = {part for part, _ in imported_parts(path, ast.parse(path.read_text()), parts)}
            graph.setdefault(part_of(path), set()).update(seen - {part_of(path), ""})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"parts import each other in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("sparse/layers.py", "from sparsam.kernels.ops import block_linear", None),
        ("sparse/layers.py", "from sparsam import kernels", None),
        ("sparse/layers.py", "from ..kernels import ops", None),
        ("sparse/layers.py", "from .patterns import Block", None),
        ("sparse/layers.py", "import torch", None),
        ("session.py", "import sparsam.sparse.part", "stands above it"),
        ("measure/clock.py", "def f():\n    from ..report import figures", "stands above it"),
        ("sparse/part.py", "from sparsam.precision import Precision", "neighbour"),
        ("sparse/part.py", "from sparsam import Session", "public face"),
        ("train.py", "import sparsam as sp", "public face"),
        ("cli/train.py", "from sparsam import __version__", None),
        ("oddments.py", "import torch", "no place"),
    ],
)
def test_the_rule_itself(file, source, fault):
    faults = broken_rules(PACKAGE / file, source, set(LAYER_OF))
    assert (fault is None and not faults) or (len(faults) == 1 and fault in faults[0])


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_short_and_named_for_what_it_holds(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines, more than one concept; at most {MAX_LINES}"
    words = {word for part in path.relative_to(PACKAGE).with_suffix("").parts for word in part.split("_")}
    assert not words & FORBIDDEN_NAMES, f"{name_of(path)}: name it for what it holds"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_for_and_what_it_offers(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{name_of(path)} opens without a line that says what it is for"
    targets = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    offers_nothing = path.name == "__main__.py" or (path.name == "__init__.py" and len(tree.body) == 1)
    assert "__all__" in targets or offers_nothing, f"{name_of(path)} has no __all__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_environment_is_not_read_at_import(path):
    body = ast.parse(path.read_text()).body
    at_import = [node for node in body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    reads = [
        part.lineno
        for node in at_import
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and part.attr in {"environ", "getenv"}
    ]
    assert not reads, f"{name_of(path)} reads the environment at import, lines {reads}"


def test_committed_text_is_finished_and_speaks_of_no_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    unfinished = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    home = re.compile(r"(/ro" r"ot/|/ho" r"me/[a-z]+/|/wo" r"rk/)")
    faults = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix in {".png", ".svg", ".ico", ".woff2"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if home.search(line) or (name.startswith(("src/", "tests/")) and unfinished.search(line)):
                faults.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not faults, "\n".join(faults)


def test_every_public_name_is_in_the_docs():
    import sparsam

    page = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^::: sparsam\.(\w+)", page, re.MULTILINE))
    public = {name for name in sparsam.__all__ if not name.startswith("__")}
    missing = "\n".join(f"::: sparsam.{name}" for name in sorted(public - listed))
    assert not public - listed, f"add to docs/api.md:\n{missing}"
    assert not listed - public, f"docs/api.md lists what sparsam.__all__ lacks: {sorted(listed - public)}"
    assert [name for name in sparsam.__all__ if not hasattr(sparsam, name)] == []
