"""Every instruction set this machine can run, forced one by one, against plain PyTorch in float64."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sparsam.kernels import BlockIndex, build_index, cpu, dense_from_blocks
from sparsam.kernels.index import blocks_from_dense
from sparsam.kernels.reference import activate, block_mean

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the compiled library is not there")
OK, BAD_ARGUMENT, OUT_OF_MEMORY, UNSUPPORTED = range(4)
FP32, BF16 = torch.float32, torch.bfloat16

# (rows, cols), (out, in): exact grids, ragged edges, layers smaller than a block; rows of x; density
SHAPES = [
    *[((32, 32), (96, 128), tokens, 0.4) for tokens in (0, 1, 7, 33, 150)],
    *[((16, 16), (40, 70), tokens, 0.5) for tokens in (0, 1, 7, 33)],
    *[((64, 64), (100, 130), tokens, 0.5) for tokens in (1, 33)],
    *[(block, (70, 100), tokens, 0.3) for block in ((1, 4), (4, 1), (7, 3), (10, 10)) for tokens in (1, 33)],
    ((16, 32), (48, 64), 33, 0.5),
    ((32, 16), (64, 48), 33, 0.5),
    ((64, 32), (100, 100), 7, 0.5),
    ((48, 24), (50, 90), 33, 0.5),
    ((1, 1), (9, 17), 33, 0.3),
    ((32, 32), (5, 3), 7, 1.0),
    ((32, 32), (64, 96), 33, 0.0),
    ((32, 32), (64, 96), 33, 1.0),
    ((16, 16), (64, 96), 33, 1.0),
    ((8, 8), (50, 60), 7, 0.0),
]
DTYPES = [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)]  # of x, of values
CASES = [
    (*shape, *DTYPES[i % 2], cpu.ACTIVATIONS[i % len(cpu.ACTIVATIONS)])
    for k, shape in enumerate(SHAPES)
    for i in (k, k + 1)
]
CASES += [((32, 32), (96, 128), 33, 0.4, *dtypes, name) for dtypes in DTYPES for name in cpu.ACTIVATIONS]
CASES += [((16, 16), (40, 70), 33, 0.4, *dtypes, "gelu") for dtypes in DTYPES[2:]]
CASES += [((32, 32), (64, 96), 4300, 0.3, *dtypes, "none") for dtypes in DTYPES[:2]]  # more rows than one pass takes
CASES += [((32, 32), (512, 544), 4300, 0.1, FP32, FP32, "gelu")]  # results larger than the caches


@pytest.fixture(params=cpu.available_isas())
def isa(request):
    before = cpu.current_isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


class Problem:
    """A layer with dead slots among the live ones, and views of x and grad whose rows are not contiguous."""

    def __init__(self, block, shape, tokens, density, dtype=FP32, values_dtype=FP32, activation="none"):
        (rows, cols), (self.out_features, self.in_features) = block, shape
        self.block, self.tokens, self.dtype, self.activation = block, tokens, dtype, activation
        self.grid = -(-self.out_features // rows), -(-self.in_features // cols)
        row, col = (torch.rand(self.grid) < density).nonzero(as_tuple=True)
        order = torch.randperm(len(row) + 2)
        row, col = (torch.cat([part, part.new_full((2,), -1)])[order].int() for part in (row, col))
        self.index: BlockIndex = build_index(row, col, *self.grid)
        live = (row >= 0)[:, None, None]
        self.values = (torch.randn(len(row), rows, cols) * live / self.in_features**0.5).to(values_dtype)
        self.x = torch.randn(tokens, self.in_features + 3).to(dtype)[:, : self.in_features]
        self.grad = torch.randn(tokens, self.out_features + 5).to(dtype)[:, : self.out_features]
        self.bias = torch.randn(self.out_features).to(values_dtype)

    def run(self, packed=None):
        """What the library writes: y, pre, dx, dvalues, dbias, scores."""
        library, index = cpu.library(), self.index
        y, pre = (torch.full((self.tokens, self.out_features), torch.nan, dtype=self.dtype) for _ in range(2))
        dx = torch.full((self.tokens, self.in_features), torch.nan, dtype=self.dtype)
        dvalues = torch.full_like(self.values, torch.nan)
        dbias, scores = torch.full((self.out_features,), torch.nan), torch.full(self.grid, torch.nan)
        library.forward(self.x, self.values, index, self.bias, self.activation, y, pre, packed)
        saved = None if self.activation == "none" else pre
        operands = self.grad, self.x, self.values, index, saved, self.activation
        library.backward(*operands, dx, dvalues, dbias)
        library.scores(*operands, scores)
        return {"y": y, "pre": pre, "dx": dx, "dvalues": dvalues, "dbias": dbias, "scores": scores}

    def expected(self, pre):
        """The same in float64. The backward starts from the library's own `pre`, as autograd would."""
        row, col = self.index.block_row, self.index.block_col
        values = self.values.to(self.dtype).double()
        weight = dense_from_blocks(values, row, col, self.out_features, self.in_features)
        exact_pre = F.linear(self.x.double(), weight, self.bias.double())
        saved = pre.double().requires_grad_()
        (grad,) = torch.autograd.grad(activate(saved, self.activation), saved, self.grad.double())
        dense = grad.T @ self.x.double()
        return {
            "y": activate(exact_pre, self.activation),
            "pre": exact_pre,
            "dx": grad @ weight,
            "dvalues": blocks_from_dense(dense, row, col, *self.block),
            "dbias": grad.sum(0),
            "scores": block_mean(dense.abs(), *self.block),
        }


def assert_close(found, expected, tolerance, what):
    scale = max(1e-3, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=tolerance * scale, msg=lambda text: f"{what}: {text}"
    )


def name_of(case):
    (rows, cols), (out_features, in_features), tokens, density, dtype, values_dtype, activation = case
    kinds = "-".join(str(kind).removeprefix("torch.") for kind in (dtype, values_dtype))
    return f"{rows}x{cols}-{out_features}x{in_features}-{tokens}rows-{density}-{kinds}-{activation}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_forward_gradients_and_scores(isa, case):
    problem = Problem(*case)
    torch.set_num_threads(2)
    found = problem.run()
    exact = problem.expected(found["pre"])
    # fp32: rounding of sums of thousands of terms. bf16: one rounding is 2^-9, of the operands and of the result.
    for what, tensor in found.items():
        rounded = BF16 in (problem.dtype, tensor.dtype)
        assert_close(tensor, exact[what], 1e-2 if rounded else 5e-6, what)


@pytest.mark.parametrize(
    ("block", "dtype", "values_dtype"),
    [(block, *dtypes) for block in ((32, 32), (16, 16), (64, 64), (7, 3)) for dtypes in DTYPES[:3]],
)
def test_packed_weights_give_the_same_forward(isa, block, dtype, values_dtype):
    for tokens in (1, 2, 5, 16, 40):
        problem = Problem(block, (100, 130), tokens, 0.4, dtype, values_dtype, "silu")
        packed = cpu.library().pack(
            problem.values, problem.index, problem.in_features, problem.out_features, problem.dtype
        )
        found, plain = problem.run(packed), problem.run()
        assert_close(found["y"], problem.expected(plain["pre"])["y"], 5e-6 if dtype == FP32 else 1e-2, "y")
        assert_close(found["y"], plain["y"].double(), 2e-6 if dtype == FP32 else 1e-2, "packed against plain")


# several panels of scores, several chunks of tokens in the gradients, forwards that take their rows in turns
LARGE = [
    ((32, 32), (700, 700), 1100, 0.3, BF16, FP32, "gelu"),
    ((64, 64), (1500, 400), 1100, 0.3, BF16, BF16, "none"),
    ((16, 16), (300, 1300), 700, 0.2, BF16, FP32, "relu2"),
    ((64, 32), (400, 600), 2300, 0.5, BF16, FP32, "none"),
    ((32, 32), (700, 700), 1100, 0.3, FP32, FP32, "silu"),
    ((10, 10), (700, 300), 1100, 0.2, BF16, FP32, "gelu_tanh"),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", LARGE, ids=name_of)
def test_shapes_that_take_more_than_one_pass(isa, case, threads):
    problem = Problem(*case)
    torch.set_num_threads(threads)
    found = problem.run()
    for what, tensor in problem.expected(found["pre"]).items():
        rounded = BF16 in (problem.dtype, found[what].dtype)
        assert_close(found[what], tensor, 1e-2 if rounded else 1e-5, what)


def test_a_dead_slot_gets_a_zero_gradient(isa):
    problem = Problem((32, 32), (96, 128), 33, 0.4)
    dead = problem.index.block_row < 0
    dvalues = problem.run()["dvalues"]
    assert dead.sum() == 2
    assert not dvalues[dead].any()
    assert dvalues[~dead].any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_results_do_not_depend_on_the_number_of_threads(isa, dtype):
    problem = Problem((32, 32), (160, 192), 100, 0.4, dtype, activation="gelu")
    torch.set_num_threads(1)
    alone = problem.run()
    torch.set_num_threads(3)
    for what, tensor in problem.run().items():
        assert_close(tensor, alone[what].double(), 5e-6 if dtype == FP32 else 1e-2, what)
    again = problem.run()
    for what, tensor in problem.run().items():
        assert torch.equal(tensor, again[what]), what


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_activation_and_slope_over_the_whole_range(isa, activation):
    """Weight 1: y is the activation itself, and dx its derivative. NaN passes, large values do not overflow."""
    special = torch.tensor([0.0, -1e-6, 1e-6, -90.0, 90.0, -1e4, 1e4])
    points = torch.cat([torch.linspace(-12, 12, 4001), special])[:, None]
    library = cpu.library()
    zero = torch.zeros(1, dtype=torch.int32)
    index = build_index(zero, zero, 1, 1)
    y, pre, dx = (torch.full_like(points, torch.nan) for _ in range(3))
    values = torch.ones(1, 1, 1)
    library.forward(points, values, index, None, activation, y, pre)
    library.backward(torch.ones_like(points), points, values, index, pre, activation, dx, None, None)
    exact = points.double().requires_grad_()
    expected = activate(exact, activation)
    expected.sum().backward()
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dx.double(), exact.grad, rtol=1e-6, atol=1e-6)
    library.forward(torch.full_like(points, torch.nan), values, index, None, activation, y, pre)
    assert y.isnan().all()


def test_bf16_results_round_to_nearest_even_and_keep_nan(isa):
    """Weight 1: what goes in comes out, except what a float32 bias pushes between two bf16 values."""
    zero = torch.zeros(1, dtype=torch.int32)
    x = torch.tensor([[1.0], [1.0078125], [float("nan")], [float("inf")], [3.0e38]], dtype=BF16)
    y, pre = torch.zeros_like(x), torch.zeros_like(x)
    half = torch.tensor([2.0**-8])  # half a step of bf16 at 1: a tie
    cpu.library().forward(x, torch.ones(1, 1, 1, dtype=BF16), build_index(zero, zero, 1, 1), half, "none", y, pre)
    torch.testing.assert_close(y, (x.float() + half).to(BF16), rtol=0, atol=0, equal_nan=True)


def call(function, problem, **changes):
    """One raw call of the C interface, with some of its arguments replaced; the status comes back."""
    layer = cpu._layer(problem.values, problem.index, problem.in_features, problem.out_features)
    for name in [name for name in changes if hasattr(layer, name)]:
        setattr(layer, name, changes.pop(name))
    x, grad, y = problem.x, problem.grad, torch.empty(problem.tokens, problem.out_features)
    out, dvalues = torch.empty(problem.grid), torch.empty_like(problem.values)
    shared = {"layer": ctypes.byref(layer), "dtype": 0, "tokens": problem.tokens}
    gradient = {
        "grad": grad.data_ptr(), "ldg": grad.stride(0), "x": x.data_ptr(), "ldx": x.stride(0),
        "pre": None, "activation": 0,
    }  # fmt: skip
    arguments = {
        "sparsam_forward": {
            **shared, "x": x.data_ptr(), "ldx": x.stride(0), "bias": problem.bias.data_ptr(), "bias_dtype": 0,
            "activation": 0, "y": y.data_ptr(), "pre": None, "packed": None, "threads": 1,
        },
        "sparsam_backward": {
            **shared, **gradient, "dx": None, "dvalues": dvalues.data_ptr(), "dbias": None, "threads": 1,
        },
        "sparsam_scores": {**shared, **gradient, "scores": out.data_ptr(), "threads": 1},
        "sparsam_pack": {"layer": shared["layer"], "dtype": 0, "packed": y.data_ptr() // 64 * 64, "threads": 1},
    }[function]  # fmt: skip
    assert changes.keys() <= arguments.keys()
    kinds = dict.fromkeys(("dtype", "bias_dtype", "activation", "threads"), ctypes.c_int32)
    kinds |= dict.fromkeys(("tokens", "ldx", "ldg"), ctypes.c_int64)
    merged = {**arguments, **changes}
    layer_argument = merged.pop("layer")
    return getattr(cpu.library().c, function)(
        layer_argument, *(kinds.get(name, ctypes.c_void_p)(value) for name, value in merged.items())
    )


LAYER_FAULTS = [
    *[{name: value} for name in ("in_features", "out_features", "rows", "cols") for value in (0, -1)],
    {"slots": -1}, {"values_dtype": 2}, {"values": None}, {"block_row": None}, {"row_start": None}, {"col_start": None},
    {"row_slots": None}, {"col_slots": None},
    {"in_features": 32}, {"out_features": 32}, {"slots": 1},  # addresses or slots past the end
]  # fmt: skip
SHARED_FAULTS = [{"layer": None}, {"dtype": 2}, {"dtype": -1}, {"tokens": -1}, {"threads": 0}]
FORWARD_FAULTS = [{"x": None}, {"y": None}, {"ldx": 1}, {"bias_dtype": 7}, {"activation": 6}, {"activation": -1}]
BACKWARD_FAULTS = [{"x": None}, {"grad": None}, {"ldx": 1}, {"ldg": 1}, {"activation": 6}, {"activation": 3}]
FAULTS = {
    "sparsam_forward": LAYER_FAULTS + SHARED_FAULTS + FORWARD_FAULTS,
    "sparsam_backward": LAYER_FAULTS + SHARED_FAULTS + BACKWARD_FAULTS,
    "sparsam_scores": [*LAYER_FAULTS, *SHARED_FAULTS, *BACKWARD_FAULTS, {"scores": None}],
    "sparsam_pack": [*LAYER_FAULTS, {"packed": None}, {"packed": 8}, {"dtype": 5}, {"threads": 0}],
}


@pytest.mark.parametrize("function", FAULTS)
def test_bad_arguments_are_refused(function):
    problem = Problem((32, 32), (96, 128), 7, 1.0)
    for fault in FAULTS[function]:
        assert call(function, problem, **fault) == BAD_ARGUMENT, fault
    if function != "sparsam_pack":
        assert call(function, problem) == OK


def test_an_index_that_points_outside_is_refused():
    problem = Problem((32, 32), (96, 128), 7, 1.0)
    for field in ("row_start", "row_slots", "col_start", "col_slots", "block_row", "block_col"):
        broken = getattr(problem.index, field).clone()
        broken[1] = 1000
        assert call("sparsam_forward", problem, **{field: broken.data_ptr()}) == BAD_ARGUMENT, field


def test_packed_weights_of_another_layer_or_instruction_set_are_refused():
    problem = Problem((32, 32), (96, 128), 7, 0.5)
    library = cpu.library()
    packed = library.pack(problem.values, problem.index, problem.in_features, problem.out_features, FP32)
    assert call("sparsam_forward", problem, packed=packed.data_ptr()) == OK
    assert call("sparsam_forward", problem, packed=packed.data_ptr(), in_features=100) == BAD_ARGUMENT
    before = cpu.current_isa()
    others = [name for name in cpu.available_isas() if name != before]
    if others:
        cpu.set_isa(others[0])
        status = call("sparsam_forward", problem, packed=packed.data_ptr())
        cpu.set_isa(before)
        assert status == BAD_ARGUMENT
    packed.zero_()
    assert call("sparsam_forward", problem, packed=packed.data_ptr()) == BAD_ARGUMENT


def test_choosing_an_instruction_set():
    c, before = cpu.library().c, cpu.current_isa()
    usable = cpu.available_isas()
    assert usable[0] == "portable"
    assert cpu.ISAS[c.sparsam_best_isa()] == usable[-1]
    for code, name in enumerate(cpu.ISAS):
        assert c.sparsam_set_isa(code) == (OK if name in usable else UNSUPPORTED)
    cpu.set_isa(before)
    for code in (-1, len(cpu.ISAS)):
        assert c.sparsam_set_isa(code) == BAD_ARGUMENT
    assert cpu.current_isa() == before
    assert c.sparsam_abi_version() == cpu.ABI_VERSION


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_several_python_threads_at_once(isa, dtype):
    problems = [Problem((32, 32), (96, 128 + 32 * i), 60 + i, 0.4, dtype, activation="gelu") for i in range(4)]
    torch.set_num_threads(2)
    alone = [problem.run() for problem in problems]
    failures = []

    def work(problem, expected):
        for _ in range(5):
            for what, tensor in problem.run().items():
                if not torch.equal(tensor, expected[what]):
                    failures.append(what)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(problems, alone, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_after_a_fork(isa, dtype):
    """The child has no thread pool and, on AMX, needs its parent's permission. It asks the library for two threads."""
    problem = Problem((32, 32), (96, 128), 60, 0.4, dtype)
    torch.set_num_threads(2)
    before = problem.run()["y"]
    child = os.fork()
    if child == 0:
        y = torch.empty_like(before)
        layer = cpu._layer(problem.values, problem.index, problem.in_features, problem.out_features)
        status = cpu.library().c.sparsam_forward(
            ctypes.byref(layer), 0 if dtype == FP32 else 1, ctypes.c_int64(problem.tokens),
            ctypes.c_void_p(problem.x.data_ptr()), ctypes.c_int64(problem.x.stride(0)),
            ctypes.c_void_p(problem.bias.data_ptr()), 0, 0, ctypes.c_void_p(y.data_ptr()), None, None, 2,
        )  # fmt: skip
        os._exit(0 if status == OK and torch.equal(y, before) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_between_matrix_products_of_torch(isa):
    """oneDNN configures the same tile registers: neither side may find the other's state."""
    problem = Problem((32, 32), (96, 128), 60, 0.4, BF16)
    a, b = torch.randn(200, 300).to(BF16), torch.randn(300, 100).to(BF16)
    product, alone = a @ b, problem.run()
    for _ in range(5):
        assert torch.equal(a @ b, product)
        for what, tensor in problem.run().items():
            assert torch.equal(tensor, alone[what]), what


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime_is_mapped():
    Problem((32, 32), (96, 128), 60, 0.4).run()
    mapped = Path("/proc/self/maps").read_text()
    runtimes = {line.split(maxsplit=5)[-1] for line in mapped.splitlines() if re.search(r"lib[gi]?omp[^/]*\.so", line)}
    assert len(runtimes) == 1, runtimes
