"""Which runs stream their models into partitions, and what says no to experts in chunks where they do not."""

import pytest

from qdeepseek.train import qat
from qdeepseek.train.config import ConfigError
from qdeepseek.train.pretrain import pretrain
from tests.train.test_config import composed

ZERO3 = ("run_dir=x", "strategy=zero3", "model.expert_chunks=2")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["strategy=auto"], "strategy=auto holds models whole"),
        (["strategy=zero2"], "strategy=zero2 holds models whole"),
        (["model=tiny_scratch"], r"model\.scratch has no checkpoint to stream"),
        (["quant=w4a4"], r"method\.rotate=auto rotates whole weights first"),
        (["method.rounding=gptq"], r"method\.rounding=gptq calibrates the whole model first"),
        (["method/lora=default"], r"method\.lora puts adapters into the whole model first"),
    ],
)
def test_chunks_are_refused_with_the_reason(words, reason):
    run = qat.Run.from_config(composed(*ZERO3, *words))
    assert not run.streams
    with pytest.raises(ConfigError, match=rf"model\.expert_chunks 2 is for .*, and {reason}; set model"):
        qat.check(run)


def test_a_streamed_run():
    assert qat.Run.from_config(composed(*ZERO3)).streams
    assert qat.Run.from_config(composed(*ZERO3, "quant=w4a4", "method.rotate=never")).streams


def test_pretraining_has_no_use_for_chunks(tmp_path):
    config = composed("run_dir=x", "experiment=pretrain_tiny", "model.expert_chunks=2")
    with pytest.raises(ConfigError, match="job=pretrain trains whole models"):
        pretrain(config, tmp_path)


@pytest.mark.parametrize("value", ["maybe", "flase", "1"])
def test_whether_to_evaluate_is_a_yes_or_a_no(value):
    with pytest.raises(ConfigError, match=f"evaluate {value} must be true or false"):
        qat.Run.from_config(composed("run_dir=x", f"evaluate={value}"))
