"""What every codec keeps to: payloads of fixed size, zeros that stay zero, nothing non-finite hidden, nothing lost."""

from __future__ import annotations

import math

import pytest
import torch

from sparsam import formats
from sparsam.comm.codecs import BF16, Identity, Int8Rows, Payload, TopK
from sparsam.comm.residual import Residuals

CODECS = {
    "identity": Identity(),
    "bf16": BF16(),
    "int8 rows": Int8Rows(),
    "int8 short rows": Int8Rows(row=5),
    "top-k": TopK(0.1),
    "top-k all": TopK(1.0),
    "top-k runs": TopK(0.25, block=4),
    "top-k runs in int8": TopK(0.25, block=4, values=Int8Rows(row=8)),
    "top-k |w g|": TopK(0.1, importance="taylor"),
    "top-k agreed": TopK(0.4, block=16, values=Int8Rows(), agreed=True),
}
LENGTHS = (0, 1, 2, 4, 7, 511, 512, 513, 1029)
ON_THE_WIRE = {torch.int8, torch.int32, torch.bfloat16, torch.float32}

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def weights_of(n):
    return 1 + 0.5 * torch.rand(n, generator=torch.Generator().manual_seed(99))


def encode(codec, x):
    return codec.encode(x, weights=weights_of(len(x)))


def through(codec, x):
    return codec.decode(encode(codec, x), len(x))


def shapes(payload):
    return [(tensor.dtype, tensor.shape) for tensor in payload.tensors]


@every_codec
def test_a_payload_has_the_same_shapes_for_every_tensor_of_a_length(codec):
    for n in LENGTHS:
        inputs = [normal(n), normal(n, 1) * 1e6, torch.zeros(n), torch.full((n,), math.nan)]
        payloads = [encode(codec, x) for x in inputs]
        for payload in payloads:
            assert shapes(payload) == shapes(payloads[0])
            assert payload.nbytes == codec.bytes_of(n) == sum(t.numel() * t.element_size() for t in payload.tensors)
            assert all(tensor.is_contiguous() and tensor.dtype in ON_THE_WIRE for tensor in payload.tensors)
            decoded = codec.decode(payload, n)
            assert decoded.shape == (n,)
            assert decoded.dtype == torch.float32


@every_codec
def test_whole_grains_are_written_in_one_call_as_by_themselves(codec):
    if codec.grain is None:
        return  # what a value becomes depends on the whole tensor
    parts = [normal(codec.grain * grains, grains) * grains for grains in (1, 3, 2)]
    together = encode(codec, torch.cat(parts))
    alone = [encode(codec, part).tensors for part in parts]
    for place, tensor in enumerate(together.tensors):
        assert torch.equal(tensor, torch.cat([tensors[place] for tensors in alone]))
        assert tensor.numel() in range(6, 6 * codec.grain + 1, 6)


def test_bytes_by_hand():
    assert Identity().bytes_of(1000) == 4000
    assert BF16().bytes_of(1000) == 2000
    assert Int8Rows().bytes_of(1000) == 1000 + 4 * 2
    assert TopK(0.07).bytes_of(100) == 7 * (4 + 4)
    assert TopK(0.1, block=4).bytes_of(41) == 2 * (4 + 16)  # 11 runs
    assert TopK(0.25, block=32, values=Int8Rows(row=32)).bytes_of(4096) == 32 * (4 + 32 + 4)


@every_codec
def test_zeros_stay_zero(codec):
    for n in LENGTHS:
        assert torch.equal(through(codec, torch.zeros(n)), torch.zeros(n))
    x = normal(1029) * (normal(1029, 1) > 0)
    assert not through(codec, x)[x == 0].any()


@every_codec
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_what_is_not_finite_is_seen(codec, value):
    for n in (1, 7, 1029):
        for x in (normal(n), torch.zeros(n), torch.full((n,), formats.FLOAT32_MAX / 2)):
            for place in {0, n // 2, n - 1}:
                broken = x.clone()
                broken[place] = value
                assert not through(codec, broken).isfinite().all()


@every_codec
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3.3e38], ids=str)
def test_finite_values_stay_finite(codec, size):
    x = normal(1029).clamp(-1, 1) * size
    decoded = through(codec, x)
    assert decoded.isfinite().all()
    assert decoded.abs().max() <= x.abs().max() * (1 + 2**-8)


@every_codec
def test_the_same_input_gives_the_same_bytes_and_is_left_alone(codec):
    x = normal(1029).mul(4).round()  # ties
    before = x.clone()
    first, second = encode(codec, x), encode(codec, x.clone())
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))
    assert torch.equal(x, before)
    strided = torch.stack([x, -x], 1)[:, 0]
    assert torch.equal(through(codec, strided), through(codec, x))


@every_codec
def test_only_lossless_ones_lose_nothing(codec):
    x = normal(1029)
    assert torch.equal(through(codec, x), x) or not codec.lossless
    assert codec.lossless == (codec == Identity())


@every_codec
def test_sums_of_additive_payloads_are_payloads_of_sums(codec):
    """Case D3 among them: what is divided first and then added in 16 bits is the mean, not infinity."""
    payload = encode(codec, normal(8))
    assert codec.additive == (len(payload.tensors) == 1 and payload.tensors[0].is_floating_point())
    if codec.additive:
        parts = [normal(1029, seed) / 4 for seed in range(4)]
        payloads = [encode(codec, part).tensors[0] for part in parts]
        together = codec.decode(Payload((payloads[0] + payloads[1] + payloads[2] + payloads[3],)), 1029)
        magnitudes = sum(part.abs() for part in parts)
        assert ((together - sum(through(codec, part) for part in parts)).abs() <= 3 * 2**-8 * magnitudes).all()
        half = encode(codec, torch.full((3,), 40000.0) / 2).tensors[0]
        torch.testing.assert_close(codec.decode(Payload((half + half,)), 3), torch.full((3,), 4e4), rtol=2**-8, atol=0)


@every_codec
def test_error_feedback_makes_the_mean_of_what_was_sent_the_mean_gradient(codec):
    n, steps = 1029, 50
    residuals, sent, alone, wanted = Residuals(), *(torch.zeros(3, n, dtype=torch.float64))
    for step in range(steps):
        gradient = normal(n) + 0.3 * normal(n, step + 1)
        wanted += gradient
        alone += through(codec, gradient)
        residuals.add("weight", gradient)
        decoded = through(codec, gradient)
        residuals.keep("weight", gradient, decoded)
        residuals.settle(True)
        sent += decoded
    left = residuals.state_dict()["residuals"]["weight"]
    torch.testing.assert_close(sent + left, wanted, rtol=0, atol=1e-4)
    error = (sent - wanted).norm() / wanted.norm()
    assert error <= (alone - wanted).norm() / wanted.norm() / 3 + 1e-7


@pytest.mark.parametrize(
    ("codec", "format"), [(BF16(), formats.BF16), (Int8Rows(), formats.INT8_ROWS)], ids=["bf16", "int8"]
)
def test_errors_are_those_of_the_format(codec, format):
    x = normal(1 << 15)
    error = (through(codec, x) - x).abs()
    assert (error / x.abs()).median() <= 1.05 * format.error_floor
    assert error.norm() / x.norm() <= 1.05 * format.l2_floor


def test_int8_rows_are_those_of_the_format_and_the_last_is_shorter():
    x = normal(1029) * torch.logspace(-6, 6, 1029)
    expected = [formats.INT8_ROWS.round(row[None]).view(-1) for row in x.split(512)]
    assert torch.equal(through(Int8Rows(), x), torch.cat(expected))


def test_int8_has_no_minus_128_and_the_largest_value_is_exact():
    codes, scale = Int8Rows(row=4).encode(torch.tensor([-127.0, 127.0, 63.5, -0.4, 0.0, -3.0])).tensors
    assert codes.tolist() == [-127, 127, 64, 0, 0, -127]
    torch.testing.assert_close(scale.flatten(), torch.tensor([1.0, 3 / 127]), rtol=1e-6, atol=0)


def test_a_broken_row_of_int8_leaves_the_others():
    x = normal(12)
    x[5] = math.inf
    decoded = through(Int8Rows(row=4), x)
    assert decoded[4:8].isnan().all()
    assert decoded[:4].isfinite().all()
    assert decoded[8:].isfinite().all()


def test_top_k_sends_the_largest_and_of_equal_ones_the_first():
    indices, values = TopK(0.5).encode(torch.tensor([1.0, -3.0, 2.0, -2.0, 2.0, 0.0])).tensors
    assert indices.tolist() == [1, 2, 3]
    assert values.tolist() == [-3.0, 2.0, -2.0]
    assert TopK(0.3).choose(torch.ones(10)).tolist() == [0, 1, 2]
    x = normal(1029)
    decoded = through(TopK(0.1), x)
    kept = x.abs().sort(descending=True).indices[:103]
    assert torch.equal(decoded[kept], x[kept])
    assert int((decoded != 0).sum()) == 103


def test_top_k_by_taylor_looks_at_weights_times_gradients():
    x, weights = torch.tensor([10.0, 1.0, -4.0, 0.1]), torch.tensor([0.0, 5.0, -2.0, 3.0])
    assert TopK(0.5, importance="taylor").decode(
        TopK(0.5, importance="taylor").encode(x, weights=weights), 4
    ).tolist() == [0.0, 1.0, -4.0, 0.0]
    assert TopK(0.5, importance="taylor").reads_weights
    assert not TopK(0.5).reads_weights


def test_top_k_runs_share_an_index():
    x = torch.tensor([0.0, 3.0, 1.0, 1.0, -2.0, -2.0, 9.0])
    indices, values = TopK(0.5, block=2).encode(x).tensors
    assert indices.tolist() == [2, 3]
    assert values.tolist() == [-2.0, -2.0, 9.0, 0.0]
    assert through(TopK(0.5, block=2), x).tolist() == [0.0, 0.0, 0.0, 0.0, -2.0, -2.0, 9.0]


def test_top_k_prefers_what_is_infinite_to_what_only_adds_up_to_it():
    x = torch.full((8,), formats.FLOAT32_MAX)
    x[7] = math.nan
    codec = TopK(0.2, block=2)
    assert codec.choose(codec.scores(x)).tolist() == [3]
    over_three_ranks = sum(codec.scores(x) / 3 for _ in range(3))
    assert over_three_ranks.isinf().tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8Rows(row=0), r"row: expected at least 1 value under a scale, got 0"),
        (lambda: TopK(0.0), r"share: expected a share of values in \(0, 1\], got 0.0"),
        (lambda: TopK(1.5), r"share: expected a share of values in \(0, 1\], got 1.5"),
        (lambda: TopK(0.1, importance="size"), r"importance: expected 'gradient' or 'taylor', got 'size'"),
        (lambda: TopK(0.1, block=0), r"block: expected runs of at least 1 value, got 0"),
        (lambda: TopK(0.5, importance="taylor").encode(torch.ones(4)), r"weights: expected \(4,\) .* got none"),
        (
            lambda: TopK(0.5, importance="taylor").encode(torch.ones(4), weights=torch.ones(3)),
            r"weights: expected \(4,\) .* got \(3,\)",
        ),
    ],
    ids=["row", "no share", "share", "importance", "block", "no weights", "weights"],
)
def test_errors_say_what_was_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@every_codec
def test_other_types_and_shapes_are_refused(codec):
    for x in (torch.ones(4, dtype=torch.float64), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="encode: expected a flat float32 tensor, got"):
            codec.encode(x, weights=torch.ones_like(x))
