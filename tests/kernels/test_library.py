"""The compiled library as Python sees it: that it is there, its scratch memory, what its refusals become."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from sparsam.kernels import block_linear, build_index, cpu, scratch_bytes

needs_library = pytest.mark.skipif(cpu.library() is None, reason="no compiled library")


def product(tokens, features=96):
    """One forward and backward whose scratch grows with the number of tokens."""
    blocks = features // 32
    index = build_index(torch.arange(blocks), torch.arange(blocks), blocks, blocks)
    x = torch.randn(tokens, features).bfloat16().requires_grad_()
    values = torch.randn(blocks, 32, 32, requires_grad=True)
    block_linear(x, values, index, features, None, "gelu").float().sum().backward()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_where_there_is_a_compiler_there_is_the_library():
    """Everything else about kernels is skipped without it: a build that broke must not look like a pass."""
    assert cpu.library() is not None, "g++ is here, libsparsam_cpu.so is not: run `make setup` and read what it says"


@needs_library
def test_scratch_grows_with_a_call_stays_and_goes_with_its_thread():
    product(8)
    before = scratch_bytes()
    held = []

    def work():
        for tokens in (50, 1500, 1500):
            product(tokens)
            held.append(scratch_bytes())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    small, large, again = held
    assert 0 < before < small < large == again
    assert math.isfinite(large)
    for _ in range(1000):  # join() returns a moment before the system's thread has ended
        if scratch_bytes() < large:
            break
        time.sleep(0.01)
    assert scratch_bytes() < large


def test_without_the_library_there_is_no_scratch(monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert scratch_bytes() == 0


@needs_library
def test_asking_what_there_is_changes_nothing(monkeypatch):
    """Another thread may be computing: the instruction set must not flip under it."""
    c = cpu.library().c
    chosen = []
    monkeypatch.setattr(c, "sparsam_set_isa", chosen.append)
    assert cpu.available_isas()[0] == "portable"
    assert not chosen
    assert [c.sparsam_has_isa(code) for code in (-1, len(cpu.ISAS))] == [1, 1]


def test_a_refusal_becomes_one_clear_line():
    with pytest.raises(
        ValueError, match=r"forward: expected operands and an index of one layer, got some that the kernel"
    ):
        cpu._check(1, "forward")


REFUSED = """
import torch
from sparsam.kernels import block_linear, build_index
assert not __debug__
index = build_index(torch.tensor([0, 1]), torch.tensor([0, 1]), 2, 2)
index.row_slots.fill_(7)  # past the end: its contents are the library's to check
try:
    block_linear(torch.ones(3, 8), torch.ones(2, 4, 4), index, 8)
except ValueError as refusal:
    print(refusal)
"""


@needs_library
def test_a_refusal_is_raised_with_assertions_off_too():
    """What comes back would be memory that nobody has written."""
    result = subprocess.run([sys.executable, "-O", "-c", REFUSED], capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("forward: expected operands and an index of one layer"), result.stderr


FORKED = """
import os, sys, torch
from sparsam.kernels import attention, add_layer_norm, cpu
torch.set_num_threads(2)
q, x = torch.randn(2, 3, 50, 64).bfloat16(), torch.randn(200, 1000)
kernel = {"attention": lambda: attention(q, q, q), "norm": lambda: add_layer_norm(x, x)[1]}[sys.argv[1]]
run = lambda: kernel().view(torch.int16).numpy().tobytes()  # torch itself would hang comparing so many in the child
out = run()
child = os.fork()
if child == 0:
    cpu._forked = False  # as any other caller of the library, which does not know of the fork
    os._exit(0 if run() == out else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(cpu.current_isa() != "amx", reason="neither kernel is here")
@pytest.mark.parametrize("kernel", ["attention", "norm"])
def test_the_library_knows_by_itself_that_a_fork_has_no_thread_pool(kernel):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, kernel], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "0", result.stderr
