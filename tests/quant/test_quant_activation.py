"""Dynamic activation fake-quant: per token, against a loop over tokens."""

import pytest
import torch

from qdeepseek.quant import QuantScheme, RangeMethod, fake_quantize_activation, fake_quantize_weight

SCHEMES = [
    QuantScheme(bits, granularity, 16, symmetric, scale_dtype=scale_dtype)
    for bits in (4, 8) for granularity in ("per_token", "per_group") for symmetric in (True, False)
    for scale_dtype in ("float32", "bfloat16")
]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"int{s.bits}-{s.granularity}-{s.symmetric}-{s.scale_dtype}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_is_a_weight_row(scheme, dtype):
    x = (torch.randn(2, 5, 32) * torch.rand(2, 5, 1) * 10).to(dtype)
    x[0, 0] = 0
    row_scheme = QuantScheme.from_dict(scheme.to_dict() | (
        {"granularity": "per_channel"} if scheme.granularity == "per_token" else {}
    ))  # fmt: skip
    x_hat = fake_quantize_activation(x, scheme)
    assert x_hat.shape == x.shape and x_hat.dtype == dtype and not x_hat[0, 0].any()
    for token, token_hat in zip(x.flatten(0, 1), x_hat.flatten(0, 1)):
        assert torch.equal(token_hat, fake_quantize_weight(token[None], row_scheme, RangeMethod())[0])


def test_int8_error_and_number_of_levels():
    x = torch.randn(64, 256)
    x_hat = fake_quantize_activation(x, QuantScheme(8, "per_token", scale_dtype="float32"))
    step = x.abs().amax(-1, keepdim=True) / 127.5
    assert ((x - x_hat).abs() <= step * 0.5001).all()
    assert max(len(row.unique()) for row in fake_quantize_activation(x, QuantScheme(4, "per_token"))) <= 16


def test_no_tokens():
    assert fake_quantize_activation(torch.zeros(0, 32), QuantScheme(8, "per_token")).shape == (0, 32)
