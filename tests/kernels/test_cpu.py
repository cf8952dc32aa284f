"""Which instruction set is used, who may choose it, and what is said when it cannot be had."""

from __future__ import annotations

import os

import pytest
import torch

from sparsam.kernels import cpu

# the function without its cache: as in a process that has not used the library yet
load = cpu.library.__wrapped__
needs_library = pytest.mark.skipif(cpu.library() is None, reason="no compiled library")


@pytest.fixture
def isa():
    """Puts back the instruction set that the other tests use."""
    before = cpu.current_isa()
    yield before
    if before != "reference":
        cpu.set_isa(before)


def test_names_come_slowest_first_and_the_best_is_in_use():
    found = cpu.available_isas()
    assert found == [name for name in cpu.ISAS if name in found]
    assert cpu.current_isa() == (found[-1] if found else "reference")


@needs_library
def test_the_environment_chooses_at_first_use(monkeypatch, isa):
    for name in cpu.available_isas():
        monkeypatch.setenv("SPARSAM_CPU_ISA", f" {name.upper()} ")
        load()
        assert cpu.current_isa() == name
    monkeypatch.setenv("SPARSAM_CPU_ISA", "reference")
    assert load() is None


def test_without_the_library_the_reference_runs(monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert cpu.current_isa() == "reference"
    assert cpu.available_isas() == []
    with pytest.raises(ValueError, match=r"set_isa: expected the compiled library for 'avx2', got none. Install"):
        cpu.set_isa("avx2")
    monkeypatch.setattr(cpu, "_find", lambda: None)
    assert load() is None
    monkeypatch.setenv("SPARSAM_CPU_ISA", "avx2")
    with pytest.raises(RuntimeError, match="SPARSAM_CPU_ISA=avx2: expected the compiled library, got none"):
        load()


@needs_library
def test_names_that_are_unknown_or_not_there(monkeypatch, isa):
    with pytest.raises(ValueError, match=r"set_isa: expected one of portable, .* or reference, got 'sse9'"):
        cpu.set_isa("sse9")
    monkeypatch.setenv("SPARSAM_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match=r"SPARSAM_CPU_ISA: expected one of portable, .* or reference, got 'sse9'"):
        load()
    monkeypatch.setattr(cpu, "ISAS", (*cpu.ISAS, "avx1024"))
    with pytest.raises(ValueError, match=r"set_isa: this machine or build has no avx1024. Leave it out"):
        cpu.set_isa("avx1024")
    assert cpu.current_isa() == isa


@needs_library
def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "ABI_VERSION", cpu.ABI_VERSION + 1)
    with pytest.raises(RuntimeError, match=r"libsparsam_cpu.so: expected interface version \d+, got \d+. Install"):
        load()


def test_memory_that_runs_out_is_said():
    with pytest.raises(MemoryError, match=r"forward: the kernel's scratch memory could not be allocated. Use fewer"):
        cpu._check(2, "forward")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons warn of threads
def test_threads_follow_torch_and_are_one_in_a_forked_child():
    """An OpenMP pool cannot be used again after fork: a child that tried would hang."""
    torch.set_num_threads(2)
    assert cpu.threads() == 2
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(cpu.threads()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 8) == b"1"
    os.close(read), os.close(write)
