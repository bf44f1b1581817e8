"""`qdeepseek plan`: composition, refusals, text and JSON, in seconds and without weights."""

import json

import pytest
from typer.testing import CliRunner

from qdeepseek.cli import app
from qdeepseek.plan.compose import conf_folder, configuration
from qdeepseek.plan.hardware import Hardware
from qdeepseek.plan.plan import make_plan
from qdeepseek.plan.remedies import remedies
from qdeepseek.train.config import ConfigError, build
from tests.train.test_config import CONF


def run(*words: str):
    return CliRunner().invoke(app, ["plan", "--conf", str(CONF), *words])


@pytest.mark.parametrize("name", sorted(f.stem for f in (CONF / "hardware").glob("*.yaml")))
def test_hardware_configurations(name):
    config, _ = configuration([f"hardware={name}"], CONF)
    assert build(Hardware, config["hardware"], "hardware").memory >= 80e9


def test_json_of_deepseek_v3():
    done = run("model=deepseek_v3", "nodes=32", "tp=8", "trainer.precision=bf16-mixed", "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)
    assert plan["coverage"]["expert_share"] == 1 and plan["configuration"] == "published values, DeepSeek-V3.json"
    assert plan["job"]["nodes"] == 32 and plan["job"]["length"] == 256
    parts = {k: v for k, v in plan["stages"]["zero3"]["memory"].items() if k not in ("total", "host", "moment")}
    assert sum(parts.values()) == pytest.approx(plan["stages"]["zero3"]["memory"]["total"])
    # layer 61 of the checkpoint: 11.5e9 parameters of a decoder layer, its own embedding and head, a 2H x H projection
    assert plan["export"]["copied"] == pytest.approx(2 * 13.46e9, rel=2e-3)
    assert plan["refusals"]["vLLM Marlin"] == []


def test_text_of_deepseek_v2_lite():
    done = run("model=deepseek_v2_lite", "quant=w4a16_g128", "tp=2", "strategy=zero3")
    assert done.exit_code == 0, done.output
    for line in (
        "strategy zero3", "15,706,484,224 parameters", "W4A16 g64", "fits without checkpointing",
        "experts: I / T 704 is no multiple of max(64, group) = 128 → group 64 or 32", "keep it in bf16",
    ):  # fmt: skip
        assert line in done.output, line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=deepseek_v9"], "model=deepseek_v9: no such choice; model is one of coder_6_7b, deepseek_v2,"),
        (["quant=w5"], "quant=w5: no such choice; quant is one of mixed, off,"),
        (["strategy=zero9"], "strategy=zero9: no such choice; strategy is one of"),
        (["nonsense"], "'nonsense' is no key=value"),
        (["nodez=3"], "nodez"),
        (["nodes=0"], "nodes 0 must be at least 1"),
        (["tp=0"], "tp 0 must be a whole number, at least 1"),
        (["gpus=abc"], "plan: gpus 'abc' must be a whole number"),
        (["gpus=1.5"], "plan: gpus 1.5 must be a whole number"),
        (["length=0"], "plan: length 0 must be at least 1"),
        (["trainer.devices=4", "trainer.nodes=2"], "trainer.devices 4 and trainer.nodes 2 say nothing"),
        (["gpu=8"], "Could not override 'gpu': no such key; there are nodes, gpus,"),
        (["strategy=zero2", "trainer.precision=bf16-true"], "trainer.precision bf16-true with strategy zero2"),
        (["hardware.mfu=2"], "hardware: mfu 2 must lie in"),
        (["model.path=/nowhere"], "no such folder"),
        (["quant.schemes.main.weight.group_size=48"], "is not a multiple of group_size 48"),
    ],
)
def test_refusals(words, message):
    done = run(*words)
    assert done.exit_code == 1 and message in done.output


def test_conf_folder_must_have_a_plan(tmp_path):
    assert conf_folder(CONF) == CONF
    with pytest.raises(ConfigError, match=r"no plan\.yaml in it"):
        conf_folder(tmp_path)


def test_the_shipped_model_and_its_export_size():
    config, chosen = configuration(["gpus=1"], CONF)
    plan = make_plan(config, chosen)
    assert chosen == "auto" and plan.extra_bytes == 0 and plan.dtype == "bfloat16"
    assert plan.fits(plan.memory["ddp"]) and plan.time["ddp"].communication == 0


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["model=deepseek_v3", "nodes=32", "strategy=zero3", "model.expert_chunks=1"],
         "strategy=zero3_offload with model.expert_chunks="),
        (["model=deepseek_v3", "nodes=32", "strategy=zero3", "model.expert_chunks=8"],
         "zero3 does not fit. What would: model.expert_chunks=64; nodes=64; strategy=zero3_offload."),
        (["model=deepseek_v2", "nodes=32", "strategy=zero3", "model.gradient_checkpointing=false"],
         "What would: model.gradient_checkpointing=true."),
        (["model=r1_distill_qwen_7b", "gpus=1", "strategy=zero2", "model.gradient_checkpointing=false"],
         "zero2 does not fit. What would: strategy=zero3_offload."),
    ],
)  # fmt: skip
def test_what_would_fit(words, advice):
    done = run(*words, "length=4096", "data.batch_size=1", "trainer.precision=bf16-mixed")
    assert advice in done.output, done.output


def test_advice_is_true():
    """The plan with the change that was named fits, the one with half of it does not."""
    common = ("nodes=32", "strategy=zero3", "length=4096", "data.batch_size=1", "trainer.precision=bf16-mixed")
    for nodes, fits in ((32, False), (64, True)):
        words = ["model=deepseek_v3", "model.expert_chunks=8", *common, f"nodes={nodes}"]
        plan = make_plan(*configuration(words, CONF))
        assert plan.fits(plan.memory["zero3"]) is fits
        assert bool(remedies(plan)) is not fits


def test_chunks_are_planned_for_streamed_models_alone():
    """A strategy that holds experts whole is noted and advised with one chunk; what training refuses is refused."""
    common = ("gpus=8", "trainer.precision=bf16-mixed", "length=64", "data.batch_size=1")
    chunked = ("model=tiny", "model.expert_chunks=4")
    whole, parts = (make_plan(*configuration([*chunked, *common, *w], CONF)) for w in ([], ["strategy=zero3"]))
    assert "model.expert_chunks 4 is for strategy=zero3" in whole.notes[-1] and not parts.notes
    for words in (["quant=w4a4"], ["method.rounding=gptq"], ["method/lora=default"]):
        with pytest.raises(ConfigError, match=r"model\.expert_chunks 4 is for a checkpoint that strategy=zero3"):
            make_plan(*configuration([*chunked, *common, *words, "strategy=zero3"], CONF))
        alone = make_plan(*configuration([*chunked, *common, *words], CONF))
        assert alone.chunked == alone.blocks, "no stage trains it in chunks"


def test_advice_is_what_training_takes():
    common = ("length=4096", "data.batch_size=1", "trainer.precision=bf16-mixed", "strategy=zero3", "nodes=2")
    rotated = make_plan(*configuration(["model=deepseek_v2", "model.expert_chunks=1", "quant=w4a4", *common], CONF))
    assert not any("expert_chunks" in change for change in remedies(rotated))
    words = ["model=tiny", "model.expert_chunks=2", "strategy=zero3_offload", "hardware.host_memory=1e6", "gpus=2"]
    found = remedies(make_plan(*configuration(words, CONF)))
    assert "strategy=zero3" in found and "strategy=ddp with model.expert_chunks=1" in found


def test_a_fit_needs_no_advice():
    done = run("model=deepseek_v2_lite", "strategy=zero3", "trainer.precision=bf16-mixed", "length=4096")
    assert "does not fit" not in done.output
