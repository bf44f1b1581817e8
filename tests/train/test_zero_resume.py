"""Runs under ZeRO in which both ranks are killed, continued bit for bit by two ranks, and by one."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from qdeepseek.train.checkpoints import COMPLETE, TAG, drop_unfinished, last_checkpoint
from qdeepseek.train.config import ConfigError
from qdeepseek.train.run import TrainerConfig, build_trainer
from qdeepseek.train.strategy import make
from qdeepseek.train.zero import ZeroConfig
from tests.train.test_zero import two_processes

JOB = "tests.train.zero_resume_job"
KILLED = [-9, -9]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_folder, text_rows):
    """whole2, whole3; broken2 killed in the unquantised stage, broken3 in QAT; one3, a copy of it as it was killed."""
    folder = tmp_path_factory.mktemp("resume")

    def job(plan: list[list[str]], *more: str, ranks: int = 2) -> list[int]:
        paths = [str(folder), json.dumps(plan), str(tiny_folder), str(text_rows)]
        codes = two_processes(folder, JOB, *paths, *more, ranks=ranks)
        assert set(codes) in ({0}, {-9}), (folder / "rank0.log").read_text()[-4000:]
        return codes

    assert job([["zero2", "whole2", ""], ["zero3", "whole3", ""], ["zero2", "broken2", "fp_ft:9"]]) == KILLED
    assert job([["zero2", "broken2", ""], ["zero3", "broken3", "qat:5"]]) == KILLED
    shutil.copytree(folder / "broken3", folder / "one3", symlinks=True)
    assert job([["zero3", "broken3", ""]]) == [0, 0]
    assert job([["zero3", "one3", ""]], "trainer.devices=1", "data.batch_size=4", ranks=1) == [0]
    return folder


def final(folder: Path, ranks: int = 2) -> dict:
    return torch.load(folder / f"final_{ranks}.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_killed_on_both_ranks_and_continued_is_bit_identical(runs, stage):
    whole, broken = final(runs / f"whole{stage}"), final(runs / f"broken{stage}")
    assert whole["state"].keys() == broken["state"].keys()
    assert [name for name, t in whole["state"].items() if not torch.equal(t, broken["state"][name])] == []
    files = [runs / f"{kind}{stage}" / "routing.json" for kind in ("whole", "broken")]
    assert files[0].read_text() == files[1].read_text(), "statistics of an unfinished interval are in the checkpoint"


@pytest.mark.slow
def test_one_rank_continues_what_two_began(runs):
    whole, one = final(runs / "whole3"), final(runs / "one3", 1)
    expected, found = sum(whole["losses"][-4:]) / 4, sum(one["losses"]) / 4
    assert len(one["losses"]) == 4, "two steps of two micro-batches were left"
    assert found == pytest.approx(expected, rel=0.01)  # rank 0's own loss of two against the loss of all of one
    worst = max(float((t.float() - one["state"][name].float()).abs().max()) for name, t in whole["state"].items())
    assert 0 < worst < 1e-3


@pytest.mark.slow
def test_a_universal_checkpoint_gives_each_group_its_own_settings(runs):
    saved = torch.load(
        runs / "one3/checkpoints/qat/step=2.ckpt/universal/zero/optimizer_state.pt", weights_only=False
    ) if (runs / "one3/checkpoints/qat/step=2.ckpt").exists() else None  # fmt: skip
    later = torch.load(
        next((runs / "one3/checkpoints/qat/step=4.ckpt/checkpoint").glob("*optim_states.pt")), weights_only=False
    )
    groups = later["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]
    assert [group["name"] for group in groups] == ["matrices", "vectors", "scales"]
    assert saved is None or [group["name"] for group in saved["param_groups"]] == ["matrices", "vectors", "scales"]


@pytest.mark.parametrize(
    ("files", "strategy", "message"),
    [
        (["mp_rank_00_model_states.pt"], "auto", "under ZeRO-1 or 2, and .* reads those written by one device or ddp"),
        (
            ["zero_pp_rank_0_mp_rank_00_model_states.pt"],
            2,
            "under ZeRO-3, and .* reads those written under ZeRO-1 or 2",
        ),
        ([], 1, "by one device or ddp, and .* config.yaml, or start a new run_dir"),
    ],
)
def test_a_checkpoint_of_another_kind_of_strategy_is_refused_before_the_fit(tmp_path, files, strategy, message):
    path = tmp_path / "checkpoints" / "qat" / "step=4.ckpt"
    (path / TAG if files else path.parent).mkdir(parents=True)
    (path / COMPLETE if files else path).touch()
    for file in files:
        (path / TAG / file).touch()
    if isinstance(strategy, int):
        strategy = make(ZeroConfig("zero", strategy), "32-true")
    with pytest.raises(ConfigError, match=message):
        build_trainer(TrainerConfig(steps=1, accelerator="cpu"), tmp_path, "qat", strategy=strategy)


def test_a_half_written_checkpoint_is_passed_over_and_removed(tmp_path):
    folder = tmp_path / "checkpoints" / "qat"
    for step, complete in ((2, True), (10, True), (12, False)):
        (folder / f"step={step}.ckpt").mkdir(parents=True)
        if complete:
            (folder / f"step={step}.ckpt" / COMPLETE).touch()
    (folder / "last.ckpt").symlink_to("step=4.ckpt")  # a kill between removing a checkpoint and moving the link
    assert last_checkpoint(tmp_path, "qat") == str(folder / "step=10.ckpt")
    drop_unfinished(tmp_path, "qat")
    assert sorted(path.name for path in folder.glob("step=*")) == ["step=10.ckpt", "step=2.ckpt"]
    assert last_checkpoint(tmp_path, "fp_ft") is None
