"""The collapsed starting point is collapsed, and the table says mean and standard error over seeds."""

import pytest
import torch

from benchmarks.routing import VARIANTS, collapse, measure, table
from qdeepseek.routing.routers import find_routers
from qdeepseek.train.qat import Run
from tests.train.test_config import composed


def batches(count=2):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (4, 32), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def test_collapsed_routers_send_nearly_everything_to_the_favourites(tiny_model):
    for router in find_routers(tiny_model).values():
        torch.nn.init.normal_(router.weight, std=0.05)
    with torch.no_grad():
        tiny_model.model.embed_tokens.weight += 0.005  # a mean hidden state that is not zero
    even = measure(tiny_model, tiny_model, batches())
    collapse(tiny_model, batches(), strength=12.0, favourites=2, seed=0)
    spoilt = measure(tiny_model, tiny_model, batches())
    assert spoilt["topk_changed"] == 0 and even["load_entropy_normalised"] > 0.8
    assert spoilt["load_entropy_normalised"] < 0.5 and spoilt["max_over_mean"] > 3.5
    assert all(sum(sorted(layer)[-2:]) > 0.9 for layer in spoilt["load"])


def test_every_variant_composes():
    for overrides in VARIANTS.values():
        Run.from_config(composed("run_dir=x", "method.distill_weight=0", *overrides.split()))


def test_table_is_mean_and_standard_error():
    keys = ("load_entropy_bits", "load_entropy_normalised", "unused_experts", "max_over_mean")
    rows = [{"variant": "a", "loss": loss, **dict.fromkeys(keys, 1.0)} for loss in (1.0, 2.0, 3.0)]
    (entry,) = table(rows)
    assert entry["seeds"] == 3 and entry["loss"] == 2 and entry["loss_se"] == pytest.approx(1 / 3**0.5)
    assert entry["unused_experts_se"] == 0
