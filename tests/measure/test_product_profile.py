"""Products per format: timed once in pairs, kept beside the linear timings, carried. Timers are stand-ins."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from sparsam.kernels.formats import BF16, FP8, FP16, FP32, INT8, PRODUCT_FORMATS, PRODUCTS
from sparsam.measure import device_profile, product_profile
from sparsam.measure.device_profile import DeviceProfile, LinearTiming
from sparsam.measure.product_profile import ProductPair, ProductPath, ProductShape, ProductTime, time_products

MS = {"fp32": 8.0, "tf32": 9.0, "bf16": 4.0, "fp16": 6.0, "fp8": 4000.0, "int8": 2.0}
LAYER = {"tokens": 512, "in_features": 64, "out_features": 128}


class Timer:
    """Notes what it is asked; answers from the table above, fp8 as estimated."""

    def __init__(self):
        self.asked = []

    def __call__(self, shape, formats):
        self.asked.append((shape, tuple(one.name for one in formats)))
        return {one.name: ProductTime(MS[one.name], "estimated" if one == FP8 else "measured") for one in formats}


def profile_of(path, timer):
    return DeviceProfile(path, lambda shape: LinearTiming(1.0, 2.0), timer)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "profile.json"


def test_time_and_gain(path):
    products = profile_of(path, Timer()).products
    assert products.product("forward", **LAYER, format=INT8) == 2.0
    assert products.product("forward", **LAYER, format=BF16) == 4.0
    assert products.gain("forward", **LAYER, now=BF16, candidate=INT8) == 2.0
    assert products.gain("forward", **LAYER, now=BF16, candidate=FP8) == 0.001
    assert products.gain("forward", **LAYER, now=FP16, candidate=INT8) == 3.0


def test_a_pair_is_timed_once_whatever_its_order(path):
    timer = Timer()
    products = profile_of(path, timer).products
    bf16, fp8 = products.pair("forward", **LAYER, first=BF16, second=FP8)
    assert (bf16, fp8) == (ProductTime(4.0, "measured"), ProductTime(4000.0, "estimated"))
    assert products.pair("forward", **LAYER, first=FP8, second=BF16) == ProductPair(fp8, bf16)
    assert profile_of(path, timer).products.product("forward", **LAYER, format=FP8) == 4000.0
    assert [names for _, names in timer.asked] == [("bf16", "fp8")]


def test_a_format_against_itself_is_not_timed(path):
    timer = Timer()
    assert profile_of(path, timer).products.gain("forward", **LAYER, now=BF16, candidate=BF16) == 1.0
    assert not timer.asked


@pytest.mark.parametrize(
    ("tokens", "timed"), [(1, 1), (3, 4), (512, 512), (600, 512), (800, 1024)], ids=lambda number: str(number)
)
def test_tokens_are_those_of_the_nearest_power_of_two(path, tokens, timed):
    timer = Timer()
    profile_of(path, timer).products.product("forward", tokens, 64, 128, INT8, threads=1)
    assert timer.asked[0][0] == ProductShape("forward", timed, 64, 128, 1)


@pytest.mark.parametrize(
    "other",
    [{"kind": "input_gradient"}, {"tokens": 1}, {"in_features": 96}, {"out_features": 96}, {"threads": 7}],
    ids=lambda other: next(iter(other)),
)
def test_everything_that_decides_the_time_is_in_the_key(path, other):
    timer = Timer()
    products = profile_of(path, timer).products
    products.product(**{"kind": "forward", **LAYER}, format=INT8)
    products.product(**{"kind": "forward", **LAYER, **other}, format=INT8)
    assert len(timer.asked) == 2


def test_linear_timings_and_products_share_a_file(path):
    first, second = profile_of(path, Timer()), profile_of(path, Timer())
    first.linear(**LAYER, rows=32, cols=32, density=0.25)
    second.products.product("forward", **LAYER, format=INT8)
    timer = Timer()
    again = DeviceProfile(path, None, timer)
    assert again.linear(**LAYER, rows=32, cols=32, density=0.25) == LinearTiming(1.0, 2.0)
    assert again.products.product("forward", **LAYER, format=INT8) == 2.0
    assert not timer.asked


def test_the_section_that_older_versions_read_holds_linear_timings_only(path):
    profile = profile_of(path, Timer())
    profile.linear(**LAYER, rows=32, cols=32, density=0.25)
    profile.products.product("forward", **LAYER, format=INT8)
    content = json.loads(path.read_text())
    assert content["version"] == 1
    linear, products = content["machines"].values()
    assert list(linear.values()) == [[1.0, 2.0]]
    assert list(products.values()) == [[[4.0, "measured"], [2.0, "measured"]]]
    assert [name.removesuffix("; products") for name in content["machines"]] == [profile.to_json()["machine"]] * 2


def test_a_file_of_an_older_version_is_read_and_kept(path):
    timer = Timer()
    profile_of(path, timer).linear(**LAYER, rows=32, cols=32, density=0.25)  # what such a file holds
    before = json.loads(path.read_text())["machines"]
    assert len(before) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile_of(path, timer).products.product("forward", **LAYER, format=INT8)
    assert before.items() <= json.loads(path.read_text())["machines"].items()


@pytest.mark.parametrize(
    "entry",
    ["7", "[4.0, 2.0]", '[[4.0, "measured"]]', '[[4.0, "measured"], [-2.0, "measured"]]', '[[4.0, "x"], [2.0, "x"]]'],
    ids=["number", "old", "half", "negative", "unknown"],
)
def test_damaged_entries_are_reported_and_timed_anew(path, entry):
    profile_of(path, Timer()).products.product("forward", **LAYER, format=INT8)
    content = json.loads(path.read_text())
    ((section, entries),) = content["machines"].items()
    content["machines"][section] = dict.fromkeys(entries, json.loads(entry))
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"device profile: expected timings in .*profile.json, got a damaged file"):
        profile = profile_of(path, Timer())
    assert profile.products.product("forward", **LAYER, format=INT8) == 2.0
    assert profile_of(path, None).products.product("forward", **LAYER, format=INT8) == 2.0


def test_a_resume_never_times_again_even_elsewhere(path, tmp_path, monkeypatch):
    profile = profile_of(path, Timer())
    profile.products.product("forward", **LAYER, format=INT8)
    carried = json.loads(json.dumps(profile.to_json()))
    monkeypatch.setattr(device_profile, "fingerprint", lambda: "another machine")
    timer = Timer()
    resumed = DeviceProfile.from_json(carried, tmp_path / "other.json", product_timer=timer)
    assert resumed.products.gain("forward", **LAYER, now=BF16, candidate=INT8) == 2.0
    assert not timer.asked
    assert resumed.to_json()["products"] == carried["products"]


def test_a_checkpoint_without_products_is_one_of_an_older_version(path):
    timer = Timer()
    resumed = DeviceProfile.from_json({"version": 1, "machine": "m", "linear": {}}, path, product_timer=timer)
    assert resumed.products.product("forward", **LAYER, format=INT8) == 2.0
    assert len(timer.asked) == 1


@pytest.mark.parametrize("products", [[], {"key": 7}, {"key": [1.0, 2.0]}], ids=["list", "number", "old"])
def test_message_of_carried_products(path, products):
    data = {"version": 1, "machine": "m", "linear": {}, "products": products}
    with pytest.raises(ValueError, match=r"device profile: expected the content of DeviceProfile.to_json\(\), got"):
        DeviceProfile.from_json(data, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "backward"}, "expected a product of forward, input_gradient, weight_gradient, got 'backward'"),
        ({"tokens": 0}, "expected sizes of at least 1, got 0 tokens, 64 in, 128 out"),
        ({"threads": 0}, "expected sizes of at least 1, got .* 0 threads"),
    ],
    ids=["kind", "tokens", "threads"],
)
def test_messages(path, change, message):
    with pytest.raises(ValueError, match=f"device profile: {message}"):
        profile_of(path, Timer()).products.product(**{"kind": "forward", **LAYER, **change}, format=INT8)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_real_timer_on_a_tiny_product_leaves_no_trace(kind):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    times = time_products(ProductShape(kind, 16, 48, 32, threads), PRODUCT_FORMATS, seconds=0.0)
    assert list(times) == [one.name for one in PRODUCT_FORMATS]
    assert all(one.ms > 0 and one.kind == "measured" for one in times.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("format", PRODUCT_FORMATS, ids=str)
def test_what_is_timed_is_the_product(kind, format):
    shape = ProductShape(kind, 16, 48, 32, 1)
    exact = product_profile._call(shape, ProductPath(FP32))()
    y = product_profile._call(shape, ProductPath(format))()
    assert y.shape == {"forward": (16, 32), "input_gradient": (16, 48), "weight_gradient": (32, 48)}[kind]
    assert y.dtype == (torch.float32 if kind == "weight_gradient" or format.bits > 16 else torch.bfloat16)
    assert torch.nn.functional.cosine_similarity(y.float().flatten(), exact.flatten(), dim=0) > 0.99


def test_a_path_that_takes_too_long_is_timed_on_less_and_scaled(monkeypatch):
    """A stand-in for the clock: 1 ms for 64^3, and 8 times that for each doubling."""
    sizes = []

    def once(call):
        sizes.append(call.tokens)
        return float((call.tokens // 64) ** 3)

    monkeypatch.setattr(product_profile, "_call", lambda shape, path: shape)
    monkeypatch.setattr(product_profile, "_once", once)
    shape, path = ProductShape("forward", 1024, 1024, 1024, 1), ProductPath(FP8)  # 4096 ms
    assert product_profile._affordable(shape, path, patience_ms=5000.0) == shape
    assert product_profile._affordable(shape, path, patience_ms=70.0).tokens == 256  # 64 ms; the next takes 512
    assert product_profile._affordable(shape, path, patience_ms=0.1).tokens == 64
    assert max(sizes) == 256
    assert product_profile._affordable(shape.at_most(50), path, patience_ms=0.1).tokens == 50


def test_a_scaled_time_is_estimated(monkeypatch):
    monkeypatch.setattr(product_profile, "_affordable", lambda shape, path, patience_ms: shape.at_most(16))
    times = time_products(ProductShape("forward", 16, 32, 16, 1), (BF16,), seconds=0.0)
    assert times["bf16"].kind == "estimated"
    assert str(times["bf16"].figure).endswith("ms (estimated)")
