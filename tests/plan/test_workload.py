"""What is read off a small model, against what its parts have."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import sparsam as sp
from sparsam.measure.flops import training_step
from sparsam.plan.times import measured_compute
from sparsam.plan.workload import buckets_of, read_workload
from sparsam.tasks.gpt import GPT


def build() -> GPT:
    return GPT(layers=2, width=64, heads=2, context=16)


@pytest.fixture(scope="module")
def workload():
    return read_workload(build, 2, 16)


def test_gradients_and_operations(workload):
    model = build()
    parameters = dict(model.named_parameters())
    assert [one.name for one in workload.gradients] == list(parameters)[::-1]
    assert {one.name: one.values for one in workload.gradients} == {n: p.numel() for n, p in parameters.items()}
    assert workload.dense_flops == training_step(model, torch.zeros(2, 16, dtype=torch.int64)).dense
    assert workload.density == 1.0


def test_a_model_without_content_keeps_as_much_as_one_with(workload):
    model = build()
    assert read_workload(lambda: model, 2, 16, fake=False).activations == workload.activations
    assert workload.activations.blocks == 2


def test_float32_keeps_more_than_bf16():
    """Of many tokens: bf16 keeps a cast of each weight, too."""
    kept = {format: read_workload(build, 64, 16, format).activations.inside for format in ("fp32", "bf16")}
    assert 1.2 < kept["fp32"] / kept["bf16"] < 2


def test_activations_are_what_autograd_keeps(workload):
    """The logits in float32 are kept for the loss, outside of blocks: 2 x 16 x 256."""
    assert workload.activations.outside >= 2 * 16 * 256 * 4
    assert workload.activations.boundary == 2 * 16 * 64 * (4 + 2)  # the stream, and the branch in bf16


def test_sparse_layers_shrink(workload):
    table = sp.inspect(build(), sp.Block(16, 16), 0.25)
    sparse = workload.sparse(table)
    values = {one.name: one.values for one in sparse.gradients}
    assert values["blocks.0.up.weight"] == 64 * 256 // 4
    assert values["head.weight"] == 256 * 64
    assert sparse.flops["blocks.0.up"] == workload.flops["blocks.0.up"] / 4
    assert sparse.rewired_values == [256 * 64, 256 * 64, 64 * 64, 3 * 64 * 64] * 2
    assert sparse.dense_values == workload.dense_values
    assert sparse.activations.inside == workload.activations.inside - 2 * (workload.values - sparse.values)


def test_buckets_are_those_that_torch_makes():
    gradients = read_workload(lambda: GPT(3, 256, 4, 16), 1, 16).gradients
    tensors = [torch.empty(one.values, device="meta") for one in gradients]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, [1 << 20, 3 << 20])
    names = [one.name for one in gradients]
    found = [[names.index(one.name) for one in bucket] for bucket in buckets_of(gradients, bytes_cap=3 << 20)]
    assert found == expected
    assert len(found) > 2


def test_a_short_run_is_looked_at(workload):
    torch.manual_seed(0)
    model = build()
    table = sp.sparsify(model, sp.Block(16, 16), 0.25)
    optimizer = torch.optim.AdamW(model.parameters())
    session = sp.Session(model, optimizer, [sp.SparseTraining(sp.static()), sp.Precision("bf16")])
    tokens = torch.randint(256, (2, 16))
    compute = measured_compute(
        session,
        lambda: F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()),
        workload.sparse(table),
        steps=1,
        warmup=0,
    )
    assert min(compute.forward, compute.backward, compute.optimizer) > 0
    assert all(0 < share <= 1 for share in compute.ready)
    order = dict(zip((one.name for one in workload.gradients), compute.ready, strict=True))
    assert order["head.weight"] < order["blocks.1.up.weight"] < order["blocks.0.qkv.weight"]
    assert session.applied_steps == 1
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
