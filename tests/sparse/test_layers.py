"""SparseLinear: to and from dense, rewiring by slots, copies and files of it, loading, and the frozen state."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sparsam import ActivatedLinear, Block, SparseLinear
from sparsam.kernels import build_index, cpu

DENSE = Block(2, 3)


def grid(text):
    """'10/01' -> bool (2, 2)."""
    return torch.tensor([[cell == "1" for cell in row] for row in text.split("/")])


def made(text="101/010", shape=(4, 9), **options):
    """A SparseLinear of the given topology with random weights, and the masked dense layer that it equals."""
    dense = nn.Linear(shape[1], shape[0])
    topology = grid(text)
    with torch.no_grad():
        dense.weight.mul_(Block(2, 3).expand(topology, shape))
    return SparseLinear.from_dense(dense, topology, Block(2, 3), **options), dense


@pytest.mark.parametrize("shape", [(4, 9), (3, 8)], ids=["whole blocks", "padded"])
@pytest.mark.parametrize("product", ["kernel", "dense"])
def test_it_computes_what_the_masked_dense_layer_computes(shape, product):
    sparse, dense = made(shape=shape, product=product)
    x = torch.randn(2, 5, shape[1], requires_grad=True)
    for module in (sparse, dense):
        x.grad = None
        y = module(x)
        y.square().sum().backward()
        module.seen = y.detach(), x.grad
    torch.testing.assert_close(sparse.seen, dense.seen, rtol=1e-4, atol=1e-5)
    mask = sparse.scatter(torch.ones_like(sparse.values))
    torch.testing.assert_close(sparse.scatter(sparse.values.grad), dense.weight.grad * mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sparse.bias.grad, dense.bias.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 6, bias=False), nn.Linear(8, 6), ActivatedLinear(8, 6, activation="silu")]
)
def test_there_and_back_is_exact(layer):
    """The ordinary layer comes back with its class, type, mode, trainability and every bit of its weights."""
    layer = copy.deepcopy(layer).double().eval()
    layer.weight.requires_grad_(False)
    sparse = SparseLinear.from_dense(layer, torch.ones(3, 3, dtype=torch.bool), DENSE)
    assert not sparse.training
    assert not sparse.values.requires_grad
    back = sparse.to_dense()
    assert type(back) is type(layer)
    assert not back.training
    assert not back.weight.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), layer.parameters(), strict=True))
    assert repr(back) == repr(layer)


def test_a_copy_of_the_dense_layer_shares_nothing():
    sparse, _ = made()
    before = sparse.weight
    with torch.no_grad():
        for parameter in sparse.to_dense().parameters():
            parameter.zero_()
    assert torch.equal(sparse.weight, before)


def test_weight_is_a_copy():
    sparse, dense = made()
    assert torch.equal(sparse.weight, dense.weight)
    sparse.weight.zero_()
    assert torch.equal(sparse.weight, dense.weight)
    assert not sparse.weight.requires_grad


def test_an_activation_is_part_of_the_product():
    dense = ActivatedLinear(9, 4, activation="gelu")
    sparse = SparseLinear.from_dense(dense, torch.ones(2, 3, dtype=torch.bool), DENSE)
    x = torch.randn(5, 9)
    torch.testing.assert_close(sparse(x), nn.functional.gelu(nn.functional.linear(x, dense.weight, dense.bias)))
    assert "activation=gelu" in repr(sparse)
    assert "activation=gelu" in repr(dense)


def test_rewiring_by_hand():
    """The slot of a dropped block gets the grown one; kept blocks keep slot and values; new ones start at zero."""
    sparse, _ = made("110/010")
    before = sparse.values.detach().clone()
    changed = sparse.rewire(grid("011/010"))
    assert changed.tolist() == [True, False, False]
    assert sparse.block_row.tolist() == [0, 0, 1]
    assert sparse.block_col.tolist() == [2, 1, 1]
    assert torch.equal(sparse.values[1:], before[1:])
    assert not sparse.values[0].any()
    assert torch.equal(sparse.topology, grid("011/010"))
    wanted = build_index(sparse.block_row, sparse.block_col, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(sparse.index, wanted, strict=True))


def test_rewiring_with_headroom_and_death():
    sparse, _ = made("110/000", slots=4)
    assert sparse.density == 2 / 6
    assert sparse.rewire(grid("111/100")).tolist() == [False, False, True, True]
    assert sparse.rewire(grid("001/000")).tolist() == [True, True, False, True]
    assert sparse.block_row.tolist() == [-1, -1, 0, -1]
    assert not sparse.values[[0, 1, 3]].any()
    assert sparse.rewire(grid("001/000")).tolist() == [False] * 4
    assert sparse.weight.count_nonzero() == 0
    assert sparse.density == 1 / 6


def test_random_rewires_keep_parameter_buffers_and_kept_values():
    """100 rewires: the same tensors all along (a compiled graph and an optimiser hold them), and no value is lost."""
    sparse, _ = made("1010/0101/1100", shape=(6, 12))
    held = [sparse.values, *sparse.buffers()]
    for _ in range(100):
        before, weight = sparse.topology, sparse.weight
        after = torch.zeros(12, dtype=torch.bool).index_fill_(0, torch.randperm(12)[:6], True).view(3, 4)
        sparse.rewire(after)
        kept = DENSE.expand(before & after, (6, 12))
        assert torch.equal(sparse.topology, after)
        assert torch.equal(sparse.weight, weight * kept)
        with torch.no_grad():
            sparse.values.normal_()
    assert all(a is b for a, b in zip(held, [sparse.values, *sparse.buffers()], strict=True))
    x = torch.randn(4, 12)
    torch.testing.assert_close(sparse(x), nn.functional.linear(x, sparse.weight, sparse.bias))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_after_a_backward(copied):
    """deepcopy and pickle after a backward (also of an update step, with a probe in place) work and share nothing."""
    sparse, _ = made()
    sparse.attached = True
    sparse.probe = torch.zeros(2, 3).requires_grad_()
    sparse(torch.randn(5, 9)).sum().backward()
    sparse.eval().freeze()
    other = copied(sparse)
    assert other.probe is None
    assert not other.attached
    x = torch.randn(5, 9)
    torch.testing.assert_close(other(x), sparse.to_dense()(x))
    other.rewire(grid("010/101"))
    with torch.no_grad():
        other.values.add_(1)
    assert torch.equal(sparse.topology, grid("101/010"))
    assert not torch.equal(other.weight, sparse.weight)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_brings_its_topology(assign):
    """Also one with another number of slots, as long as no training loop holds the parameter."""
    saved, _ = made("111/110")
    loaded, _ = made("001/000")
    state = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    assert list(state) == ["values", "bias", "block_row", "block_col"]
    loaded.load_state_dict(state, assign=assign)
    assert torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded(torch.ones(1, 9)), saved(torch.ones(1, 9)))
    loaded(torch.ones(1, 9)).sum().backward()
    assert loaded.values.grad.shape == saved.values.shape


def test_addresses_of_another_integer_type_are_taken_over_as_int32():
    """load_state_dict(assign=True) keeps the type of what it is given; a kernel would read garbage."""
    sparse, _ = made()
    state = {name: t.long() if t.dtype == torch.int32 else t for name, t in sparse.state_dict().items()}
    other, _ = made("010/101")
    other.load_state_dict(state, assign=True)
    assert other.block_row.dtype == other.block_col.dtype == torch.int32
    assert torch.equal(other.weight, sparse.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["block_row"].fill_(2),
        lambda state: state["block_col"].fill_(7),
        lambda state: state["block_row"].fill_(-2),
        lambda state: state["block_col"].fill_(-1),
        lambda state: (state["block_row"].fill_(0), state["block_col"].fill_(0)),
    ],
    ids=["row outside", "column outside", "below -1", "half dead", "one block twice"],
)
@pytest.mark.parametrize("assign", [False, True])
def test_addresses_outside_the_grid_never_reach_a_kernel(change, assign):
    """A state of a layer with other sides (or a damaged file) must be refused, not read past the end of a tensor."""
    sparse, _ = made()
    weight, state = sparse.weight, {name: tensor.clone() for name, tensor in sparse.state_dict().items()}
    change(state)
    with pytest.raises(RuntimeError, match="SparseLinear: expected block addresses in 2 x 3, each once, got others"):
        sparse.load_state_dict(state, assign=assign)
    assert torch.equal(sparse.weight, weight)


def test_a_state_of_another_block_size_is_refused_by_torch():
    other = SparseLinear(9, 4, torch.ones(4, 3, dtype=torch.bool), Block(1, 3))
    with pytest.raises(RuntimeError, match="size mismatch for values"):
        made()[0].load_state_dict(other.state_dict())


@pytest.mark.parametrize("why", ["gradient", "session"])
def test_another_number_of_slots_is_refused_once_somebody_holds_the_parameter(why):
    """A new Parameter behind an optimiser's back would train nothing, in silence."""
    sparse, _ = made("001/000")
    if why == "gradient":
        sparse(torch.ones(1, 9)).sum().backward()
    else:
        sparse.attached = True
    model = nn.Sequential(sparse)
    state = {f"0.{name}": tensor for name, tensor in made("111/110")[0].state_dict().items()}
    with pytest.raises(
        ValueError, match=r"0: expected 1 slots, got 5. Load another density before the optimiser exists"
    ):
        model.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types_change_values_and_never_addresses(dtype):
    sparse, _ = made()
    topology = sparse.topology
    sparse.to(dtype)
    assert sparse.values.dtype == dtype
    assert {buffer.dtype for buffer in sparse.buffers()} == {torch.int32}
    assert torch.equal(sparse.topology, topology)


def test_devices():
    """`meta` stands in for a GPU: everything moves, nothing computes, repr still works."""
    sparse, _ = made()
    sparse.to("meta")
    assert {tensor.device.type for tensor in (*sparse.parameters(), *sparse.buffers(), sparse.topology)} == {"meta"}
    assert sparse(torch.empty(5, 9, device="meta")).shape == (5, 4)
    assert "sparsity=?" in repr(sparse)
    built = SparseLinear(9, 4, grid("101/010"), DENSE, device=torch.device("meta"))
    assert built(torch.empty(5, 9, device="meta")).shape == (5, 4)
    saved, _ = made()
    built.load_state_dict(saved.state_dict(), assign=True)
    x = torch.randn(5, 9)
    torch.testing.assert_close(built(x), saved(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_rows_are_the_same_rows(autocast):
    dense = ActivatedLinear(96, 64, activation="gelu")
    sparse = SparseLinear.from_dense(dense, torch.rand(2, 3) < 0.7, Block(32, 32)).eval()
    for rows in (0, 1, 3, 16):
        x = torch.randn(rows, 96)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            sparse.unfreeze()
            wanted = sparse(x)
            sparse.freeze()
            torch.testing.assert_close(sparse(x), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "change",
    [
        lambda sparse: sparse.load_state_dict(sparse.state_dict() | {"values": 2 * sparse.values.detach()}),
        lambda sparse: sparse.double().float(),
        lambda sparse: sparse.train(),
        lambda sparse: sparse.rewire(~sparse.topology | sparse.topology.flip(0)),
        lambda sparse: (sparse.block_col.sub_(1).remainder_(2), sparse.rebuild_index()),
    ],
    ids=["load", "move", "train", "rewire", "address"],
)  # fmt: skip
def test_no_pack_outlives_the_weights_it_was_made_of(change):
    sparse, _ = made("11/01", shape=(4, 6))
    x = torch.randn(3, 6)
    sparse.eval().freeze()
    with torch.no_grad():
        sparse(x)
        change(sparse)
        torch.testing.assert_close(sparse(x), sparse.to_dense()(x))


@pytest.mark.skipif(len(cpu.available_isas()) < 2, reason="one instruction set")
def test_a_frozen_layer_packs_again_for_another_instruction_set():
    sparse = SparseLinear.from_dense(nn.Linear(96, 64), torch.ones(2, 3, dtype=torch.bool), Block(32, 32)).eval()
    x, before = torch.randn(2, 96), cpu.current_isa()
    sparse.freeze()
    try:
        with torch.no_grad():
            for isa in (before, *cpu.available_isas(), before):
                cpu.set_isa(isa)
                torch.testing.assert_close(sparse(x), sparse.to_dense()(x), rtol=1e-4, atol=1e-5)
    finally:
        cpu.set_isa(before)


def frozen(dtype=torch.float32):
    """A frozen ActivatedLinear(96, 64) with most of its 32 x 32 blocks, and 3 rows for it."""
    dense = ActivatedLinear(96, 64, activation="gelu").to(dtype)
    sparse = SparseLinear.from_dense(dense, grid("101/110"), Block(32, 32)).eval()
    sparse.freeze()
    return sparse, torch.randn(3, 96, dtype=dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda bias: bias.data.mul_(2),
        lambda bias: setattr(bias, "data", torch.randn(64)),
    ],
    ids=["in place", "other memory"],
)
@torch.no_grad()
def test_a_frozen_layer_reads_its_bias_at_every_call(change):
    sparse, x = frozen()
    before = sparse(x)
    change(sparse.bias)
    after = sparse(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, sparse.to_dense()(x))
    sparse.bias = None
    torch.testing.assert_close(sparse(x), sparse.to_dense()(x))


@torch.no_grad()
def test_copies_of_a_frozen_layer_hold_no_pack():
    sparse, x = frozen()
    wanted = sparse(x)
    for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert twin._packed is None
        torch.testing.assert_close(twin(x), wanted)
        twin.freeze()
        assert torch.equal(twin(x), wanted)


def test_many_python_threads_share_one_frozen_layer():
    """The first of them packs; some may do so twice, and all get the same rows."""
    sparse, x = frozen()
    with torch.no_grad():
        wanted = sparse(x)
    sparse.freeze()

    def work(_):
        with torch.inference_mode():
            return [sparse(x) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, wanted) for found in pool.map(work, range(8)) for y in found)


@pytest.mark.parametrize("warm", [True, False])
@torch.no_grad()
def test_a_frozen_layer_compiles(warm):
    """Whole when it has packed; before that the graph breaks where it packs."""
    torch._dynamo.reset()
    sparse, x = frozen(torch.bfloat16)
    wanted = sparse(x)
    if not warm:
        sparse.freeze()
    compiled = torch.compile(sparse, backend="aot_eager", fullgraph=warm)
    assert torch.equal(compiled(x), wanted)
    assert torch.equal(compiled(x), wanted)
    assert torch.equal(sparse(x), wanted)


def test_a_frozen_layer_under_a_mode_or_a_transform():
    sparse, x = frozen()
    sparse.requires_grad_(False)
    wanted = sparse(x)
    torch.testing.assert_close(torch.vmap(sparse)(x), wanted)
    with torch.device("meta"):
        torch.testing.assert_close(sparse(x), wanted)
    sparse.bias.requires_grad_()
    torch.testing.assert_close(sparse(x).detach(), wanted)


@pytest.mark.filterwarnings("ignore:.*has no kernel")
def test_frozen_float64_is_left_alone_by_autocast():
    sparse, _ = made()
    sparse.double().eval().freeze()
    x = torch.randn(2, 9, dtype=torch.float64)
    with torch.no_grad():
        wanted = sparse.to_dense()(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = sparse(x)
    torch.testing.assert_close(found, wanted)


def test_an_attribute_of_a_plain_layer_is_not_its_activation():
    """Whoever calls their own note `activation` applies it outside of the layer."""
    dense = nn.Linear(9, 4)
    dense.activation = "gelu"
    sparse = SparseLinear.from_dense(dense, torch.ones(2, 3, dtype=torch.bool), DENSE)
    assert sparse.activation == "none"
    x = torch.randn(5, 9)
    torch.testing.assert_close(sparse(x), dense(x))


def test_frozen_refuses_to_train():
    sparse, _ = made()
    sparse.eval().freeze()
    with pytest.raises(ValueError, match=r"SparseLinear: frozen for inference. Call it under torch.no_grad\(\)"):
        sparse(torch.randn(2, 9))
    sparse.requires_grad_(False)
    sparse(torch.randn(2, 9))


def test_probe_of_a_scattered_product_is_the_dense_gradient():
    """Also where the weights are bfloat16: adding the probe must not change the type of the product."""
    for dtype in (torch.float32, torch.bfloat16):
        sparse, dense = made(product="dense")
        sparse.to(dtype), dense.to(dtype)
        sparse.probe = torch.zeros(4, 9).requires_grad_()
        x = torch.randn(5, 9, dtype=dtype)
        sparse(x).sum().backward()
        dense(x).sum().backward()
        assert torch.equal(sparse.probe.grad, dense.weight.grad.float())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: SparseLinear(9, 4, grid("10/01"), DENSE), r"expected a topology of \(2, 3\) for 4 x 9 in Block"),
        (lambda: made(slots=2), "expected at least 3 slots for the active blocks, got 2"),
        (lambda: made()[0](torch.zeros(2, 8)), r"expected x of \(..., 9\), got \(2, 8\)"),
        (
            lambda: made()[0].rewire(grid("111/111")),
            "rewire: expected at most 3 active blocks .* got 6. Give the layer",
        ),
        (lambda: ActivatedLinear(2, 2, activation="tanh"), "expected an activation of none, .*, got 'tanh'"),
    ],
)
def test_what_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_the_instruction_set_does_not_matter():
    """Every path this machine has gives the same rows and gradients as the masked dense layer."""
    isas = cpu.available_isas()
    current = cpu.current_isa()
    try:
        for isa in isas:
            cpu.set_isa(isa)
            test_it_computes_what_the_masked_dense_layer_computes((3, 8), "kernel")
    finally:
        if isas:
            cpu.set_isa(current)
