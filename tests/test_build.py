"""The package as it is built and installed: wheel, tag, one OpenMP, and a machine without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "sparsam/kernels/libsparsam_cpu.so"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

has_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


def python(code: str, **environment: str) -> str:
    """Runs code in a new interpreter and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_core_stays_small():
    names = {re.split(r"[<>=\[]", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "numpy", "safetensors", "pydantic", "typer", "rich", "plotly", "pyyaml"}


def test_version_is_the_installed_one():
    from importlib.metadata import version

    import sparsam

    assert sparsam.__version__ == version("sparsam")


def test_nothing_is_built_for_the_machine_at_hand():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "-march=native" not in cmake
    assert "-ffast-math" not in cmake


def test_importing_the_package_loads_no_extras():
    code = "import sys, sparsam; print([m for m in ('transformers', 'plotly', 'typer', 'pytest') if m in sys.modules])"
    assert python(code) == "[]"


def test_one_openmp_is_mapped():
    """Two OpenMP runtimes in one process would each start a pool, and both pools would fight for the cores."""
    maps = python(
        "import torch, sparsam.kernels.cpu as cpu\n"
        "torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "print(cpu.library() is not None)\n"
        "print(open('/proc/self/maps').read())"
    )
    loaded, _, table = maps.partition("\n")
    runtimes = {line.split()[-1] for line in table.splitlines() if re.search(r"/lib(gomp|omp|iomp5)[^/]*\.so", line)}
    assert len(runtimes) == 1, runtimes
    if loaded == "True":
        assert "libsparsam_cpu.so" in table


def build_wheel(folder: Path, *, source: Path = ROOT, **environment: str) -> tuple[Path, str]:
    """Builds a wheel with the tools of this environment; returns it and what the build said."""
    options = ["--verbose", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return next(folder.glob("*.whl")), said


def run_from_wheel(wheel: Path, folder: Path, code: str) -> str:
    """Runs code against the wheel, not against the sources that this environment is linked to."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    done = subprocess.run(
        # -S: the link to the sources is a .pth file, which only `site` reads
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), sysconfig.get_path("purelib")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CHECK = """
import torch
from sparsam import kernels
values, index = torch.ones(1, 16, 16), kernels.build_index(*torch.zeros(2, 1, dtype=torch.int32), 1, 1)
y = kernels.block_linear(torch.ones(3, 16), values, index, 16)
assert torch.equal(y, torch.full((3, 16), 16.0)), y
print(kernels.__file__)
print(kernels.backend())
"""


@has_gcc
@pytest.mark.slow
@pytest.mark.integration
def test_wheel_holds_the_library_and_fits_every_python(tmp_path):
    wheel, _ = build_wheel(tmp_path)
    assert re.fullmatch(r"sparsam-[\d.]+-py3-none-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert LIBRARY in names
    assert "sparsam/py.typed" in names
    assert not [name for name in names if "csrc" in name or name.startswith("tests")]
    file, backend = run_from_wheel(wheel, tmp_path / "site", CHECK).split("\n")
    assert Path(file).is_relative_to(tmp_path)
    assert backend != "reference"


@has_gcc
@pytest.mark.slow
@pytest.mark.integration
def test_library_needs_openmp_and_the_c_runtime_only(tmp_path):
    wheel, _ = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(LIBRARY, tmp_path)
    table = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[([^\]]+)\]", table))
    assert "libgomp.so.1" in needed
    assert {re.sub(r"\.so.*", "", name) for name in needed} <= {
        "libgomp", "libstdc++", "libgcc_s", "libm", "libc", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64",
    }  # fmt: skip
    exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in exported.stdout.splitlines()}
    assert names
    assert {name for name in names if not name.startswith("sparsam_")} == set()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/nowhere/c++"}, "no C++ compiler found"),
        ({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler found"),
    ],
    ids=["CXX names nothing", "empty PATH"],
)
def test_without_a_compiler_it_installs_and_says_so_in_one_line(tmp_path, environment, reason):
    source = tmp_path / "source"
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src")
    # what an earlier build left in the sources must not travel on
    (source / "src" / LIBRARY).write_bytes(b"stale")

    wheel, said = build_wheel(tmp_path, source=source, **environment)

    message = f"sparsam: {reason}: installed without compiled kernels, runs on the PyTorch reference path."
    assert [line.strip() for line in said.splitlines()].count(message) == 1, said
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    file, backend = run_from_wheel(wheel, tmp_path / "site", CHECK).split("\n")
    assert Path(file).is_relative_to(tmp_path)
    assert backend == "reference"
