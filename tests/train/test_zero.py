"""Every method under ZeRO-1/2/3 and DDP, two processes over gloo (zero_job.py): the same losses, decisions, weights."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qdeepseek.train.config import ConfigError
from qdeepseek.train.pretrain import pretrain
from qdeepseek.train.strategy import parse
from qdeepseek.train.zero import ZeroConfig, deepspeed_config
from tests.train.test_config import composed
from tests.train.test_guard import NORM

ROOT = Path(__file__).parents[2]
STAGES = ("zero1", "zero2", "zero3")
PLAN = {
    "everything": ["ddp", *STAGES], "decisions": ["ddp", *STAGES], "cage": ["ddp", "zero2", "zero3"],
    "lora": ["ddp", "zero2", "zero3"], "lowering": ["zero2", "zero3"], "disjoint": ["zero1", "zero3", "zero3_offload"],
    "mixed": ["ddp", "zero2", "zero3"], "broken": ["zero3"], "chunks": ["zero2", "zero3", "zero3_offload"],
}  # fmt: skip


def two_processes(folder: Path, module: str, *arguments: str, timeout: int = 580, ranks: int = 2) -> list[int]:
    """Exit codes of a job run by torchrun's environment; its output is in folder/rank*.log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NODE_RANK": "0",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}  # fmt: skip
    jobs = []
    for rank in range(ranks):
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        with open(folder / f"rank{rank}.log", "a") as log:
            jobs.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
    try:
        return [job.wait(timeout) for job in jobs]
    finally:
        for job in jobs:
            job.kill()


@pytest.fixture(scope="module")
def found(tmp_path_factory, tiny_config):
    from transformers import DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("zero")
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(tiny_config).save_pretrained(folder / "model")
    codes = two_processes(folder, "tests.train.zero_job", str(folder / "model"), str(folder), json.dumps(PLAN))
    assert codes == [0, 0], (folder / "rank0.log").read_text()[-3000:] + (folder / "rank1.log").read_text()[-3000:]
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return {**{case: [rank[case] for rank in ranks] for case in PLAN}, "folder": folder}


def largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key].float() - b[key].float()).abs().max()) for key in a)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["everything", "cage", "lora"])
def test_losses_and_weights_are_those_of_ddp(found, case):
    for rank in range(2):
        ddp = found[case][rank]["ddp"]
        for stage in PLAN[case][1:]:
            zero = found[case][rank][stage]
            assert zero["losses"] == pytest.approx(ddp["losses"], abs=1e-5), stage
            # Adam's first steps are sign-like, so a rounding of a gradient near zero moves a weight by up to lr a step
            assert largest_difference(zero["weights"], ddp["weights"]) < 1e-3, stage
            assert zero["names"] == ddp["names"], "the teacher is in no state dict"


@pytest.mark.slow
def test_ranks_hold_the_same_weights_and_router_biases(found):
    for stage in STAGES:
        first, second = (found["everything"][rank][stage] for rank in range(2))
        for kind in ("weights", "buffers"):
            assert largest_difference(first[kind], second[kind]) == 0, (stage, kind)
        biases = [b for name, b in first["buffers"].items() if name.endswith("e_score_correction_bias")]
        assert biases and all(b.abs().max() > 0 for b in biases), "the bias update moved them"
        ddp = found["everything"][0]["ddp"]["buffers"]
        assert largest_difference(first["buffers"], ddp) == 0, stage


@pytest.mark.slow
def test_scheduler_and_guard_decide_the_same_on_every_rank_and_stage(found):
    reference = found["decisions"][0]["zero1"]
    assert [event["step"] for event in reference["guard"]] == [3]
    assert reference["guard"][0]["rank"] == 1 and "mlp.experts" in reference["guard"][0]["module"]
    assert len(reference["events"]) > 2, "the scheduler moved groups"
    for rank in range(2):
        for stage in STAGES:
            decided = found["decisions"][rank][stage]
            assert decided["guard"] == reference["guard"], (rank, stage)
            assert decided["rungs"] == reference["rungs"], (rank, stage)
        assert found["decisions"][rank]["ddp"]["guard"][0]["module"] == reference["guard"][0]["module"]


@pytest.mark.slow
def test_an_infinite_weight_in_one_rank_s_part_is_named_on_both(found):
    first, second = (found["broken"][rank]["zero3"] for rank in range(2))
    assert first["guard"] == second["guard"] and first["stopped"] == second["stopped"]
    assert "there was no good state to go back to" in first["stopped"]
    steps = [(e["step"], e["module"], e["where"], e["rank"], e["action"]) for e in first["guard"]]
    assert steps == [(2, NORM, "weight", 1, "skip"), (3, NORM, "weight", 1, "stop")]


@pytest.mark.slow
def test_a_scale_found_on_the_way_down_is_the_same_whole_and_in_parts(found):
    for rank in range(2):
        two, three = (found["lowering"][rank][stage] for stage in ("zero2", "zero3"))
        # a searched scale is the best of a few: a last bit of a weight may choose its neighbour
        assert two["losses"] == pytest.approx(three["losses"], abs=1e-3)
        assert two["groups"] == three["groups"] and len(three["groups"]) == (0 if rank else 40)  # rank 0 writes
        assert two["rungs"] == three["rungs"] and set(three["rungs"]) == {0}


@pytest.mark.slow
def test_ranks_that_use_other_experts_do_not_wait_for_one_another(found):
    for rank in range(2):
        whole, *parts = (found["disjoint"][rank][stage] for stage in PLAN["disjoint"])
        for part in parts:
            assert part["losses"] == pytest.approx(whole["losses"], abs=1e-5)


@pytest.mark.slow
def test_experts_in_chunks_train_as_whole_ones_do(found):
    for rank in range(2):
        whole, *parts = (found["chunks"][rank][where] for where in PLAN["chunks"])
        for part in parts:
            assert part["losses"] == pytest.approx(whole["losses"], abs=1e-5)
            assert largest_difference(part["weights"], whole["weights"]) < 1e-3
            assert len(part["names"]) > len(whole["names"]) and part["guard"] == whole["guard"] == []


@pytest.mark.slow
def test_routers_biases_and_scales_stay_fp32_under_bf16(found):
    for stage in PLAN["mixed"]:
        result = found["mixed"][0][stage]
        assert set(result["dtypes"].values()) == {"torch.float32", "torch.int8"} & set(result["dtypes"].values())
        assert result["losses"] == pytest.approx(found["mixed"][0]["ddp"]["losses"], abs=2e-3), stage
    exact = found["decisions"][0]["zero3"]["losses"][0]
    assert found["mixed"][0]["zero3"]["losses"][0] != exact, "products are in bf16"


@pytest.mark.slow
def test_adapters_are_saved_from_partitions(found):
    files = {p: found["folder"] / "lora" / p / "adapter" / "adapter_model.safetensors" for p in PLAN["lora"]}
    saved = {place: load_file(file) for place, file in files.items()}
    assert all(tensor.ndim == 2 for tensor in saved["zero3"].values()) and len(saved["zero3"]) > 10
    for stage in PLAN["lora"][1:]:
        assert largest_difference(saved[stage], saved["ddp"]) < 1e-3, stage


@pytest.mark.slow
def test_the_json_that_deepspeed_ran_by_is_in_the_run(found):
    written = json.loads((found["folder"] / "everything" / "zero3" / "deepspeed.json").read_text())
    assert written["zero_optimization"]["stage"] == 3
    assert written["gradient_accumulation_steps"] == 2 and written["gradient_clipping"] == 0.1


@pytest.mark.parametrize("name", [*STAGES, "zero3_offload"])
def test_every_strategy_composes_and_is_understood_by_deepspeed(name):
    config = composed(f"strategy={name}", "run_dir=x")
    parsed = parse(config)
    assert isinstance(parsed, ZeroConfig) and parsed.name == name
    from deepspeed.runtime.config import DeepSpeedConfig

    written = deepspeed_config(parsed, "bf16-mixed")
    read = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **written})
    assert int(read.zero_config.stage) == parsed.stage
    assert (read.zero_config.offload_optimizer is not None) == parsed.offload
    assert read.torch_autocast_enabled and not read.bfloat16_config.enabled


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=zero2", "trainer.precision=bf16-true"], "precision bf16-true .* use one of 32-true, bf16-mixed"),
        (["strategy=zero2", "model.dtype=bfloat16"], "model.dtype bfloat16 with strategy zero2.*float32"),
        (["strategy=zero2", "+strategy.stages=1"], "strategy: unknown key stages"),
        (["strategy=zero2", "strategy.stage=4"], "stage 4 is none of 1, 2, 3"),
        (["strategy=zero2", "+strategy.zero_optimization.stage=3"], "follows from stage and offload"),
        (["strategy=ddp", "+strategy.bucket=1"], "strategy: unknown key bucket"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_at_once(overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse(composed("run_dir=x", *overrides))


def test_pretraining_in_parts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"strategy zero3: job=pretrain writes whole weights.*use zero2 or ddp"):
        pretrain(composed("experiment=pretrain_tiny", "strategy=zero3", f"run_dir={tmp_path}"), tmp_path)
