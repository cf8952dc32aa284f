"""The device profile: timed once, kept on disk and in checkpoints, whole after any failure. Timers are stand-ins."""

from __future__ import annotations

import json
import os

import pytest
import torch

from sparsam.measure import device_profile
from sparsam.measure.device_profile import DeviceProfile, LinearShape, LinearTiming, default_path, time_linear


class Timer:
    """Counts how often it is asked; answers 1, 2, 3, ... ms."""

    def __init__(self):
        self.asked: list[LinearShape] = []

    def __call__(self, shape):
        self.asked.append(shape)
        return LinearTiming(float(len(self.asked)), 10.0)


LAYER = {"tokens": 512, "in_features": 64, "out_features": 128, "rows": 32, "cols": 32}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "profile.json"


def test_timed_once_in_this_process_and_the_next(path):
    timer = Timer()
    first = DeviceProfile(path, timer)
    assert first.linear(**LAYER, density=0.25) == LinearTiming(1.0, 10.0)
    assert first.linear(**LAYER, density=0.25) == LinearTiming(1.0, 10.0)
    assert DeviceProfile(path, timer).linear(**LAYER, density=0.25) == LinearTiming(1.0, 10.0)
    assert len(timer.asked) == 1


@pytest.mark.parametrize(
    "other",
    [{"density": 0.5}, {"format": "fp32"}, {"threads": 7}, {"tokens": 1}, {"rows": 16}, {"in_features": 96}],
    ids=lambda other: next(iter(other)),
)
def test_everything_that_decides_the_time_is_in_the_key(path, other):
    timer = Timer()
    profile = DeviceProfile(path, timer)
    profile.linear(**LAYER, density=0.25)
    profile.linear(**{**LAYER, "density": 0.25, **other})
    assert len(timer.asked) == 2


def test_densities_with_the_same_blocks_share_a_timing(path):
    timer = Timer()
    profile = DeviceProfile(path, timer)  # a grid of 4 x 2 blocks
    profile.linear(**LAYER, density=0.25)
    profile.linear(**LAYER, density=0.26)
    assert len(timer.asked) == 1


def test_another_machine_or_library_is_timed_anew(path, monkeypatch):
    timer = Timer()
    DeviceProfile(path, timer).linear(**LAYER, density=0.25)
    monkeypatch.setattr(device_profile, "fingerprint", lambda: "another machine")
    DeviceProfile(path, timer).linear(**LAYER, density=0.25)
    assert len(timer.asked) == 2
    assert len(json.loads(path.read_text())["machines"]) == 2


def test_a_resume_never_times_again_even_elsewhere(path, tmp_path, monkeypatch):
    profile = DeviceProfile(path, Timer())
    timing = profile.linear(**LAYER, density=0.25)
    carried = json.loads(json.dumps(profile.to_json()))
    monkeypatch.setattr(device_profile, "fingerprint", lambda: "another machine")
    timer = Timer()
    resumed = DeviceProfile.from_json(carried, tmp_path / "other.json", timer)
    assert resumed.linear(**LAYER, density=0.25) == timing
    assert not timer.asked
    assert resumed.to_json()["linear"] == carried["linear"]


def test_two_processes_do_not_lose_each_other_s_timings(path):
    first, second = DeviceProfile(path, Timer()), DeviceProfile(path, Timer())
    first.linear(**LAYER, density=0.25)
    second.linear(**LAYER, density=0.5)
    (entries,) = json.loads(path.read_text())["machines"].values()
    assert len(entries) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"machines": 3}', "\x00\x01"])
def test_a_damaged_file_is_reported_and_replaced(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(UserWarning, match=r"device profile: expected timings in .*profile.json, got a damaged file"):
        profile = DeviceProfile(path, Timer())
    profile.linear(**LAYER, density=0.25)
    assert json.loads(path.read_text())["machines"]


def test_a_file_that_cannot_be_written_is_reported_and_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    with pytest.warns(UserWarning, match="device profile: expected"):
        profile = DeviceProfile(tmp_path / "file" / "profile.json", Timer())
    with pytest.warns(UserWarning, match="device profile: expected to write .* Timings are kept for this run only"):
        timing = profile.linear(**LAYER, density=0.25)
    assert profile.linear(**LAYER, density=0.25) == timing


def test_a_failed_write_leaves_the_old_file_whole(path, monkeypatch):
    profile = DeviceProfile(path, Timer())
    profile.linear(**LAYER, density=0.25)
    before = path.read_text()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        profile.linear(**LAYER, density=0.5)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_default_path_follows_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "sparsam" / "device_profile.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path() == tmp_path / "home" / ".cache" / "sparsam" / "device_profile.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "device profile: expected sizes of at least 1"),
        ({"density": 1.5}, r"device profile: expected a density in \[0, 1\], got 1.5"),
        ({"format": "fp8"}, "device profile: expected a format of fp32, bf16, got 'fp8'"),
    ],
)
def test_messages(path, change, message):
    with pytest.raises(ValueError, match=message):
        DeviceProfile(path, Timer()).linear(**{**LAYER, "density": 0.25, **change})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"version": 9, "linear": {}}, "device profile: expected version 1, got 9"),
        ([], "device profile: expected the content of"),
        ({"version": 1}, "device profile: expected the content of"),
    ],
)
def test_messages_of_carried_profiles(path, data, message):
    with pytest.raises(ValueError, match=message):
        DeviceProfile.from_json(data, path, Timer())


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize(("out_features", "density"), [(32, 0.5), (40, 0.0), (40, 1.0)])
def test_real_timer_on_a_tiny_layer_leaves_no_trace(format, out_features, density):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    timing = time_linear(LinearShape(8, 50, out_features, 16, 16, density, format, threads), seconds=0.0)
    assert timing.compact_ms > 0
    assert timing.dense_ms > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
