from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam import checkpoint
from sparsam.measure import DeviceProfile
from sparsam.measure.device_profile import LinearTiming
from sparsam.ranks import ALONE, Ranks
from sparsam.recipe import parse_recipe
from sparsam.replicas import _carried, notes, own_state, replicated, threads_of, without_gone
from sparsam.tasks.language import Batches


def left_out(rank: int, ranks: int) -> dict:
    residuals = {"version": 1, "residuals": {"a": torch.full((3,), float(2**rank)), f"only.{rank}": torch.ones(2)}}
    return {
        "rng": {},
        "compression": {"rank": rank, "ranks": ranks, "on": True, "decision": "as measured.", "residuals": residuals},
    }


@pytest.mark.parametrize(("then", "now"), [(4, 2), (2, 4), (3, 2), (2, 2)])
def test_what_compression_left_out_counts_for_as_much_on_another_number_of_ranks(then, now):
    found = [_carried(lambda rank: left_out(rank, then), then, Ranks(rank, now)) for rank in range(now)]
    assert [(one["rank"], one["ranks"], one["on"]) for one in found] == [(rank, now, True) for rank in range(now)]
    kept = [one["residuals"]["residuals"] for one in found]
    before = sum(2.0**rank for rank in range(then)) / then
    assert float(sum(one["a"][0] for one in kept if "a" in one)) / now == pytest.approx(before)
    for rank in range(then):
        assert float(sum(one[f"only.{rank}"][0] for one in kept if f"only.{rank}" in one)) / now == pytest.approx(
            1 / then
        )


def test_a_run_of_one_rank_left_nothing_out():
    assert _carried(lambda rank: pytest.fail("read what is not there"), 1, Ranks(0, 2)) is None


def test_weights_that_are_stored_in_another_way_start_without_residuals():
    model = nn.Linear(2, 3)
    kept = {"weight": torch.ones(3, 2), "bias": torch.ones(9), "gone": torch.ones(1)}
    state = without_gone({"on": True, "residuals": {"version": 1, "residuals": kept}}, model.named_parameters())
    assert state["on"]
    assert state["residuals"]["residuals"].keys() == {"weight"}


def test_alone_nothing_is_wrapped_or_said():
    model, recipe = nn.Linear(2, 2), parse_recipe("version: 1")
    assert replicated(model, ALONE) is model
    assert own_state(None, ALONE) is None
    assert notes([], recipe, ALONE, "") == []
    assert threads_of(parse_recipe("version: 1\ntraining: {threads: 3}"), Ranks(0, 2, 2)) == 3


def test_the_report_has_a_line_of_the_bytes():
    recipe = parse_recipe("version: 1\ntraining: {batch: 8}\ntwin: none")
    records = [{"comm.bytes": 100.0, "comm.ratio": 0.25}, {"comm.bytes": 300.0, "comm.ratio": 0.75}, {"kind": "eval"}]
    ranks, gradients = notes(records, recipe, Ranks(0, 4), "compression is on: when='always'.")
    assert ranks.startswith("4 ranks trained 2 sequences of each batch each")
    assert gradients == (
        "Gradients: 200 bytes a step from each rank, 50 % of a float32 ring's (modelled); "
        "compression is on: when='always'"
    )


def test_ranks_share_the_batches_of_one():
    tokens = torch.arange(500)
    whole = Batches(tokens, 4, 10, seed=3)
    shares = [Batches(tokens, 4, 10, seed=3, share=(rank, 2)) for rank in range(2)]
    for _ in range(15):  # over the end of an epoch
        assert torch.equal(whole.next().inputs, torch.cat([share.next().inputs for share in shares]))


def test_timings_of_another_profile_answer(tmp_path):
    first = DeviceProfile(tmp_path / "a.json", timer=lambda shape: LinearTiming(1.0, 2.0))
    assert first.linear(8, 16, 16, 8, 8, 0.5, "fp32", 1).compact_ms == 1.0
    second = DeviceProfile(tmp_path / "b.json", timer=lambda shape: LinearTiming(5.0, 2.0))
    second.carry(first.to_json())
    assert second.linear(8, 16, 16, 8, 8, 0.5, "fp32", 1).compact_ms == 1.0


def test_what_a_rank_has_for_itself_is_hashed_too(tmp_path):
    own = {"rng": torch.arange(3), "drawn": [1, (2, 3)]}
    checkpoint.write(tmp_path / "step", {"model": {"w": torch.ones(2)}}, own)
    assert checkpoint.read(tmp_path / "step").keys() == {"model"}
    found = checkpoint.read_own(tmp_path / "step", 0)
    assert torch.equal(found["rng"], own["rng"])
    assert found["drawn"] == own["drawn"]
    path = tmp_path / "step" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert checkpoint.read(tmp_path / "step", check_ranks=False).keys() == {"model"}
    for read in (lambda: checkpoint.read(tmp_path / "step"), lambda: checkpoint.read_own(tmp_path / "step", 0)):
        with pytest.raises(checkpoint.CheckpointError, match=r"not a whole checkpoint \(rank-00000\.safetensors: its"):
            read()
