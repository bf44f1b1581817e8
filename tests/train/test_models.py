"""Models of a run, whole or as a skeleton to fill, come with experts that obey autocast."""

import pytest

from qdeepseek.train.models import ModelConfig, load_model
from qdeepseek.train.partitioned import skeleton


def test_loaded_experts_obey_autocast(tiny_folder):
    config = ModelConfig(path=str(tiny_folder))
    for model in (load_model(config), skeleton(config)):
        assert model.config._experts_implementation == "qdeepseek_grouped_mm"
        assert "qdeepseek" not in model.config.to_json_string()


@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_expert_chunks_must_be_a_count(value):
    with pytest.raises(ValueError, match=f"expert_chunks {value} must be a whole number"):
        ModelConfig(path="tiny", expert_chunks=value)
