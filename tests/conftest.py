"""What every test gets: no network, no cache of the user's, a fixed seed, its own thread count."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile(
    "sparsam",
    deadline=None,  # no test asserts a time
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("sparsam")

_cache = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_cache] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="sparsam-tests-")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", NO_COLOR="1", COLUMNS="120")
    os.environ.pop("SPARSAM_CPU_ISA", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_cache], ignore_errors=True)


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Seeds every generator, and puts back what a test may change for the whole process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the code under test may draw from the global generator)
    torch.manual_seed(0)
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
