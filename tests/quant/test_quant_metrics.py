"""Metrics against hand-computed values."""

import math

import torch

from qdeepseek.quant import QuantScheme
from qdeepseek.quant.metrics import code_entropy, mse, saturation, sqnr_db


def test_mse_and_sqnr():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5])
    assert mse(a, b).item() == 0.125
    assert math.isclose(sqnr_db(a, b).item(), 20.0, rel_tol=1e-6)
    assert sqnr_db(a, a).item() == math.inf


def test_code_entropy_and_saturation():
    scheme = QuantScheme(bits=4)
    all_codes = torch.arange(-8, 8, dtype=torch.int8)
    assert math.isclose(code_entropy(all_codes, scheme).item(), 4.0, rel_tol=1e-6)
    assert code_entropy(torch.zeros(5, dtype=torch.int8), scheme).item() == 0
    assert saturation(all_codes, scheme).item() == 2 / 16
