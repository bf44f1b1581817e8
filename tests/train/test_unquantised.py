"""A folder of fp_ft and branch that several runs share: same settings only, made by one job at a time."""

import fcntl

import pytest

from qdeepseek.train import unquantised
from qdeepseek.train.config import ConfigError
from qdeepseek.train.qat import Run
from tests.train.test_config import composed


def config(tmp_path, *overrides):
    return composed(f"run_dir={tmp_path / 'run'}", f"unquantised_dir={tmp_path / 'shared'}", *overrides)


def test_without_it_the_folder_is_the_runs_own(tmp_path):
    alone = composed(f"run_dir={tmp_path / 'run'}")
    assert Run.from_config(alone).unquantised == tmp_path / "run"
    with unquantised.claimed(alone) as folder:
        assert folder == tmp_path / "run" and not folder.exists()


def test_runs_that_quantise_differently_share(tmp_path):
    with unquantised.claimed(config(tmp_path)) as first:
        assert first == tmp_path / "shared"
    other = config(tmp_path, "quant=w4a4", "optim@qat_optim=qat_w3", "method.delay_steps=3", "method.distill_weight=0")
    with unquantised.claimed(other) as second:
        assert second == first == Run.from_config(other).unquantised


def test_adapters_of_qat_alone_share_and_those_of_both_stages_do_not(tmp_path):
    with unquantised.claimed(config(tmp_path)):
        pass
    with unquantised.claimed(config(tmp_path, "method/lora=default", "method.lora.stages=qat")):
        pass
    both = config(tmp_path, "method/lora=default")
    with pytest.raises(ConfigError, match=r"method\.lora"), unquantised.claimed(both):
        raise AssertionError("was given")


@pytest.mark.parametrize("override", ["seed=1", "optim.lr=1", "trainer.steps=7", "method.qat_fraction=0.25"])
def test_other_settings_are_refused(tmp_path, override):
    with unquantised.claimed(config(tmp_path)):
        pass
    with (
        pytest.raises(ConfigError, match=f"another configuration: .*{override.split('=')[0]}"),
        unquantised.claimed(config(tmp_path, override)),
    ):
        raise AssertionError("was given")


def test_only_one_job_makes_it(tmp_path):
    with unquantised.claimed(config(tmp_path)) as folder, open(folder / ".lock", "w") as second:
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "fp_ft").mkdir()
        (folder / "fp_ft" / "config.json").write_text("{}")
    with unquantised.claimed(config(tmp_path)), open(folder / ".lock", "w") as second:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)  # complete: readers do not hold each other up


def test_several_processes_need_it_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="several processes"), unquantised.claimed(config(tmp_path)):
        raise AssertionError("was given")
