"""The machine: allowance from affinity and cgroup quotas of both versions, thread advice, plain data."""

from __future__ import annotations

import json

import pytest

from sparsam.measure import machine


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A /proc and a /sys/fs/cgroup to write into, on a machine where this process may use 8 CPUs."""
    monkeypatch.setattr(machine, "_affinity", lambda: 8)
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"

    def allowed(cgroup_file: str, files: dict[str, str]) -> float:
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(cgroup_file)
        for name, content in files.items():
            place = groups / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
        return machine.allowed_cpus(proc, groups)

    return allowed


@pytest.mark.parametrize(
    ("cgroup_file", "files", "expected"),
    [
        pytest.param("0::/a/b\n", {}, 8.0, id="no quota"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 8.0, id="v2 unlimited"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0, id="v2 parent"),
        pytest.param("0::/only/on/host\n", {"cpu.max": "300000 100000"}, 3.0, id="v2 inside a container"),
        pytest.param(
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"},
            2.5,
            id="v1",
        ),
        pytest.param(
            "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8.0, id="v1 unlimited"
        ),
    ],
)
def test_allowance(kernel, cgroup_file, files, expected):
    assert kernel(cgroup_file, files) == expected


@pytest.mark.parametrize(
    ("allowed", "workers", "threads"), [(2.0, 1, 2), (2.0, 4, 1), (64.0, 4, 16), (1.5, 1, 1), (0.5, 1, 1)]
)
def test_threads_stay_within_the_allowance(monkeypatch, allowed, workers, threads):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: allowed)
    assert machine.thread_allowance(workers) == threads
    # More workers than CPUs cannot fit: that is what the warning is for.
    assert (machine.thread_warning(threads, workers) is None) == (threads * workers <= max(1.0, allowed))


def test_warning_says_what_to_set(monkeypatch):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: 2.0)
    assert machine.thread_warning(2) is None
    assert machine.thread_warning(64) == (
        "threads: expected at most 2 in all (CPU affinity and cgroup quota), got 1 x 64. Set OMP_NUM_THREADS=2."
    )


def test_no_workers():
    with pytest.raises(ValueError, match="thread_allowance: expected at least 1 worker, got 0"):
        machine.thread_allowance(0)


def test_description_is_plain_data_and_complete():
    described = machine.describe()
    json.dumps(described)
    for name in ("cpu", "cores", "allowed_cpus", "isa", "threads", "memory_bytes", "load_average", "torch", "python"):
        assert described[name] is not None
    assert 0 < described["allowed_cpus"] <= described["cores"]
    assert described["memory_bytes"] > 2**20


def test_fingerprint_changes_with_what_decides_a_timing(monkeypatch):
    before = machine.fingerprint()
    assert machine.fingerprint() == before
    monkeypatch.setattr(machine, "_isa", lambda: "another")
    assert machine.fingerprint() != before
