"""Columns of one scheme, the keys of metrics.json, and that gaps are taken against FP_ft."""

import copy
import json
import math

import pytest
import torch

from eval.retention import COLUMNS, Column, Retention, evaluate_columns, run_metrics, write_metrics
from eval.size import Size
from eval.token_metrics import TokenMetrics


def sums(loss, kl, agreement, units=40, noise=0.002):
    """Column whose documents share their difficulty with all others of this helper."""
    tokens = torch.arange(100, 100 + units).double()
    hard = torch.randn(units, generator=torch.Generator().manual_seed(0)).double() * 0.3
    own = torch.randn(units, generator=torch.Generator().manual_seed(int(loss * 1e6))).double() * noise
    return TokenMetrics("document", torch.arange(units), tokens, (loss + hard + own) * tokens,
                        0.68 * tokens, (kl * (1 + own)) * tokens, agreement * tokens)  # fmt: skip


@pytest.fixture
def metrics():
    return {
        "base": sums(1.157, 0.02, 0.93), "fp_ft": sums(1.150, 0.0, 1.0), "rtn": sums(1.170, 0.02, 0.94),
        "gptq": sums(1.160, 0.01, 0.96), "qat": sums(1.154, 0.004, 0.97),
    }  # fmt: skip


def test_stable_keys(metrics, tmp_path):
    size = Size(3_000_000, 4.5, 6.1, 0.9)
    retention = Retention("w4a16_g32", metrics, size, Size(9_000_000, None, 16.0, 0.0))
    report = run_metrics([retention], coverage={"quantized_share": 0.9}, seconds={"qat": 60.0})
    file = tmp_path / "metrics.json"
    write_metrics(file, report)
    read = json.loads(file.read_text())
    assert {"schemes", "coverage", "seconds"} <= set(read)
    entry = read["schemes"]["w4a16_g32"]
    for key in ("loss", "kl", "agreement", "perplexity", "accuracy"):
        assert tuple(entry[key]) == COLUMNS and tuple(entry["ci95"][key]) == COLUMNS
        assert all(low <= entry[key][c] <= high for c, (low, high) in entry["ci95"][key].items())
    assert set(entry["gap_recovered"]) == {"loss", "kl"} == set(entry["ci95"]["gap_recovered"])
    assert entry["bits_per_weight"] == 4.5 and entry["bytes"] == 3_000_000
    assert entry["bytes_full"] == 9_000_000 and entry["bytes_bf16"] == 9_000_000  # 16 bits a parameter
    assert entry["held_out"]["unit"] == "document" and entry["held_out"]["units"] == 40
    assert not list(tmp_path.glob("*.tmp"))


def test_gap_is_against_fp_ft_and_paired(metrics):
    entry = Retention("s", metrics).to_dict()
    loss = entry["loss"]
    assert entry["gap_recovered"]["loss"] == pytest.approx((loss["rtn"] - loss["qat"]) / (loss["rtn"] - loss["fp_ft"]))
    assert entry["gap_recovered"]["loss"] == pytest.approx(0.8, abs=0.05)
    assert entry["gap_recovered"]["kl"] == pytest.approx(0.8, abs=0.01)
    assert entry["gap_recovered_by"]["gptq"]["loss"] == pytest.approx(0.5, abs=0.05)
    low, high = entry["ci95"]["delta_loss"]["qat"]
    assert 0 < low < entry["delta_loss"]["qat"] < high and high - low < 0.004
    wide_low, wide_high = entry["ci95"]["loss"]["qat"]
    assert wide_high - wide_low > 0.1  # documents differ far more than columns
    assert entry["qat_minus_gptq"]["loss"] < 0 and entry["ci95"]["qat_minus_gptq"]["loss"][1] < 0
    assert entry["kl"]["fp_ft"] == 0 and entry["delta_loss"]["fp_ft"] == 0
    assert entry["perplexity"]["qat"] == pytest.approx(math.exp(loss["qat"]))


def test_without_a_gap_the_reason_is_given(metrics):
    metrics["rtn"] = sums(1.1501, 0.0, 1.0)
    entry = Retention("s", metrics).to_dict()
    assert entry["gap_recovered"] == {"loss": None, "kl": None} == entry["ci95"]["gap_recovered"]
    assert "not clearly above zero" in entry["gap_recovered_reason"]["loss"]


def test_missing_and_extra_columns(metrics):
    del metrics["gptq"], metrics["base"]
    metrics["autoround"] = sums(1.158, 0.008, 0.96)
    entry = Retention("s", metrics).to_dict()
    assert entry["loss"]["gptq"] is None and entry["ci95"]["loss"]["gptq"] is None
    assert set(entry["loss"]) == {*COLUMNS, "autoround"}
    assert entry["qat_minus_autoround"]["loss"] < 0
    json.dumps(entry, allow_nan=False)


def test_one_document_has_no_interval(metrics):
    one = {name: sums(1.15 + 0.01 * i, 0.01 * i, 0.9, units=1) for i, name in enumerate(metrics)}
    entry = Retention("s", one).to_dict()
    assert entry["ci95"]["loss"]["qat"] is None and entry["gap_recovered"]["loss"] is None
    assert "one held-out unit" in entry["gap_recovered_reason"]["loss"]


def test_columns_on_other_tokens_are_refused(metrics):
    metrics["qat"] = sums(1.15, 0.0, 1.0, units=39)
    with pytest.raises(ValueError, match="column qat was scored on other tokens"):
        Retention("s", metrics)


def test_evaluate_columns(tiny_model):
    ids = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.1)
    batches = [{"input_ids": ids, "labels": ids}]
    found = evaluate_columns([Column("fp_ft", tiny_model), Column("qat", other)], batches)
    entry = Retention("s", found).to_dict()
    assert entry["kl"]["fp_ft"] == 0 and entry["kl"]["qat"] > 0 and entry["loss"]["rtn"] is None
    with pytest.raises(ValueError, match="lack fp_ft"):
        evaluate_columns([Column("qat", other)], batches)
