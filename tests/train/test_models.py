"""Models of a run, whole or as a skeleton to fill, come with experts that obey autocast."""

from qdeepseek.train.models import ModelConfig, load_model
from qdeepseek.train.partitioned import skeleton


def test_loaded_experts_obey_autocast(tiny_folder):
    config = ModelConfig(path=str(tiny_folder))
    for model in (load_model(config), skeleton(config)):
        assert model.config._experts_implementation == "qdeepseek_grouped_mm"
        assert "qdeepseek" not in model.config.to_json_string()
