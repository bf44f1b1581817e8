"""Checkpoints into ZeRO-3 partitions, partitions into folders, ZeRO checkpoints into exports: all equal one process's.

One pair of gloo processes (zero_io_job.py) does what needs both ranks; the exports are made here, without DeepSpeed.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qdeepseek.cli import app
from qdeepseek.export import names
from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.writer import ShardWriter
from qdeepseek.surgery import prepare
from qdeepseek.train.config import ConfigError
from qdeepseek.train.export_saved import export_saved, read_run
from qdeepseek.train.models import load_model
from qdeepseek.train.saved import open_checkpoint

JOB = Path(__file__).with_name("zero_io_job.py")
ROOT = Path(__file__).parents[2]
BLOCK = 128
BIG = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 13, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "n_routed_experts": 36, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 128, "num_nextn_predict_layers": 0,
}  # fmt: skip


def write_v3(folder: Path, tiny_config) -> None:
    """DeepSeek-V3 in bf16 whose router and bias are not what initialisation makes, with the byte tokenizer."""
    from qdeepseek.train.tokenizer import pretrained_byte_tokenizer

    torch.manual_seed(1)
    model = transformers.DeepseekV3ForCausalLM(tiny_config).bfloat16()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.data = torch.randn(8)
        layer.mlp.gate.weight.data = torch.randn(8, 128)
    model.save_pretrained(folder)
    pretrained_byte_tokenizer(512).save_pretrained(folder)


def write_qwen2(folder: Path) -> None:
    """Qwen2 with a tied embedding and biases."""
    from qdeepseek.train.tokenizer import pretrained_byte_tokenizer

    config = transformers.Qwen2Config(
        vocab_size=288, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=256,
        eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    torch.manual_seed(2)
    model = transformers.Qwen2ForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)
    pretrained_byte_tokenizer(512).save_pretrained(folder)


def write_fp8(folder: Path, source: Path) -> None:
    """`source` as DeepSeek publishes it: projections in FP8 blocks."""
    shutil.copytree(source, folder)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            tensors[name] = weight
            continue
        grid = [-(-size // BLOCK) for size in weight.shape]
        scale = torch.rand(grid) + 0.5
        spread = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
        tensors[name], tensors[f"{name}_scale_inv"] = (weight.float() / spread).to(torch.float8_e4m3fn), scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))


def write_big(folder: Path, shard: int) -> None:
    """About 400 MB of bf16 in many shards, none of its tensors above 19 MB."""
    config = transformers.DeepseekV3Config(**BIG)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    folder.mkdir()
    shards, layout = ShardWriter(folder, shard), names.layout_of("deepseek_v3")
    noise = torch.randn(1024 * 1024).bfloat16()
    for name, tensor in model.state_dict().items():
        for expert in range(tensor.shape[0]) if names.is_fused(name) else [None]:
            for part in names.parts_of(name) if expert is not None else [None]:
                shape = tensor.shape if expert is None else names.rows_of(part, tensor[expert]).shape
                stored = name if expert is None else f"{names.expert_module(name, expert, part, layout)}.weight"
                shards.add(stored, noise[: shape.numel()].view(shape))
    shards.finish()
    config.save_pretrained(folder)


def run_job(folder: Path, overrides: list[str]) -> dict:
    """Both ranks of zero_io_job.py; what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}  # fmt: skip
    command = [sys.executable, str(JOB), str(folder), *overrides]
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            log = stack.enter_context(open(folder / f"rank{rank}.log", "w"))
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own))
            stack.callback(ranks[-1].kill)
        codes = [process.wait(timeout=420) for process in ranks]
    assert codes == [0, 0], "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_config, text_rows):
    """(folder, what the two ranks found)."""
    folder = tmp_path_factory.mktemp("zero_io")
    write_v3(folder / "v3", tiny_config)
    write_qwen2(folder / "qwen2")
    write_fp8(folder / "fp8", folder / "v3")
    write_big(folder / "big", 40_000_000)
    shutil.copytree(folder / "v3", folder / "broken")
    tensors = load_file(folder / "v3" / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "broken" / "model.safetensors", metadata={"format": "pt"})
    overrides = [
        f"model.path={folder / 'v3'}", "data=sft", f"data.path={text_rows}", "data.max_length=64", "data.batch_size=2",
        "data.too_long=split", "quant=w4a16_g32", "quant.schemes.main.method.learned=true", "method.start=base",
        "method.distill_weight=0", "trainer.steps=4", "trainer.checkpoint_every=2", "trainer.accelerator=cpu",
        "trainer.devices=2", "trainer.validate_every=100", "qat_optim.warmup_steps=1", "method/kv_cache=int8",
    ]  # fmt: skip
    return folder, run_job(folder, overrides)


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors*")}


@pytest.mark.slow
def test_partitions_of_a_checkpoint_are_those_of_a_whole_load(job):
    assert job[1]["load"] == {case: [] for case in job[1]["load"]}
    assert len(job[1]["load"]) == 7
    assert "model.layers.2.mlp.experts.5.up_proj.weight (missing)" in job[1]["broken"]


@pytest.mark.slow
def test_a_disk_that_fails_in_the_middle_of_a_load_ends_every_rank(job):
    for said in job[1]["unreadable"]:
        assert said.endswith("model.layers.1.mlp.experts.down_proj cannot be loaded (Input/output error)")
    assert job[1]["unreadable"][1].startswith("rank 0 could not read ")


@pytest.mark.slow
def test_a_rank_holds_its_share_and_a_few_tensors(job):
    for rank in job[1]["peaks"]:
        print({key: f"{value / 1e6:.0f} MB" for key, value in rank.items()})
        assert rank["whole"] > 300e6 and rank["largest"] < rank["whole"] / 15
        assert rank["peak"] < rank["partition"] + 4 * rank["largest"]


@pytest.mark.slow
def test_a_gathered_save_is_save_pretrained(job):
    assert job[1]["save"] == {"v3 4": [], "qwen2 1": []}


@pytest.mark.slow
def test_training_goes_on_from_partitions_as_from_a_whole_model(job):
    print(job[1]["loss"], job[1]["seconds"])
    assert job[1]["loss"]["streamed"] == pytest.approx(job[1]["loss"]["zero3"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3", "streamed"])
def test_every_kind_of_checkpoint_exports_to_the_bytes_of_one_process(job, stage):
    run = job[0] / stage
    done = CliRunner().invoke(app, ["export", str(run)])
    assert done.exit_code == 0, done.output
    assert ("ZeRO-3 of 2 ranks" if stage in ("zero3", "streamed") else "ZeRO-1 or 2") in done.output
    found = hashes(run / "export" / "compressed_tensors")
    if stage != "streamed":  # its experts are in chunks, those of plain.ckpt whole
        assert found == hashes(export_saved(run, run / "plain.ckpt", run / "plain").result.folder)
    settings = read_run(run)
    model = load_model(settings.model)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model, settings.recipe)
    settings.methods["kv_cache"].attach(settings, model)
    state = torch.load(run / "plain.ckpt")["state_dict"]
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    assert not torch.equal(model.state_dict()["lm_head.weight"], start["lm_head.weight"])
    alone = export(model, run / "alone", recipe=settings.recipe, dtype=torch.float32)
    assert found == hashes(alone.folder)


@pytest.mark.slow
def test_what_is_wrong_with_a_checkpoint_is_said(job, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(job[0] / "zero3", run, symlinks=True)
    last = next((run / "checkpoints" / "qat").glob("step=*.ckpt"))
    first = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    second = last / "checkpoint" / first.replace("rank_0_", "rank_1_")

    def error(checkpoint: Path | None = None) -> str:
        with pytest.raises((ConfigError, ValueError)) as caught:
            export_saved(run, checkpoint, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    assert f"{second} is no complete file" in error(last)
    second.unlink()
    assert f"{second.name} is missing" in error(last)
    second.write_bytes((second.parent / first).read_bytes())
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("learned: true", "learned: false"))
    assert "lacks model.layers.0.mlp.down_proj.weight_quantizer.clip_ratio" in error(last)
    (run / "config.yaml").write_text(config.replace("delay_steps: 0", "delay_steps: 9"))
    assert "method.delay_steps 9" in error(last)
    (run / "config.yaml").write_text(config)
    (last / "complete").unlink()
    assert "holds no complete checkpoint" in error()
    assert "only in part" in error(last)
    assert "does not exist" in error(run / "nothing.ckpt")
    (run / "config.yaml").unlink()
    assert "is no run" in error()


@pytest.mark.slow
def test_any_slice_of_a_partitioned_tensor(job):
    saved = open_checkpoint(next((job[0] / "zero3" / "checkpoints" / "qat").glob("step=*.ckpt")))
    state = torch.load(job[0] / "zero3" / "plain.ckpt")["state_dict"]
    assert {f"model.{name}" for name in saved.tensors} == set(state)
    for name, tensor in saved.tensors.items():
        whole = state[f"model.{name}"].reshape(-1)
        begin, end = len(whole) // 3, len(whole) - len(whole) // 4
        assert torch.equal(tensor.read(begin, end), whole[begin:end]), name


@pytest.mark.slow
def test_a_bf16_engine_and_frozen_weights(job):
    """What is read is the bf16 weight that the forward used: DeepSpeed's fp32 copy, rounded."""
    assert job[1]["bf16"] == []
