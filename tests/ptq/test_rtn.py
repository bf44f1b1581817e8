"""Round to nearest: the quantisers as they come, on."""

import torch

from qdeepseek.ptq.rtn import round_to_nearest
from qdeepseek.quant import RangeMethod, fake_quantize_weight
from qdeepseek.surgery import prepare, quantized_tensors


def test_switches_on_and_finds_scales_of_the_present_weights(small_model, load_recipe):
    prepare(small_model, load_recipe("w4a16_g32", (("schemes", "main", "method", "kind"), "mse")))
    with torch.no_grad():
        for t in quantized_tensors(small_model):
            t.quantizer.enabled = False
            t.weight.copy_(torch.randn(t.weight.shape, generator=torch.Generator().manual_seed(1)))
    weights = {t.name: t.weight.detach().clone() for t in quantized_tensors(small_model)}
    round_to_nearest(small_model)
    for t in quantized_tensors(small_model):
        assert torch.equal(t.weight, weights[t.name])
        want = fake_quantize_weight(t.weight, t.scheme, RangeMethod(kind="mse"))
        assert torch.equal(t.quantizer(t.weight), want), t.name
