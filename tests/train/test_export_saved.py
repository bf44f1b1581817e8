"""`qdeepseek export` from plain checkpoints: adapters, levels; and the memory that a large ZeRO-3 checkpoint takes."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from qdeepseek.export.compressed_tensors import export
from qdeepseek.surgery import prepare, quantized_tensors
from qdeepseek.train import adapters
from qdeepseek.train.config import ConfigError
from qdeepseek.train.export_saved import export_saved, read_run
from qdeepseek.train.models import load_model
from qdeepseek.train.saved import open_checkpoint

ROOT = Path(__file__).parents[2]


def make_run(folder: Path, *overrides: str):
    folder.mkdir()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", [f"run_dir={folder}", "quant=w4a16_g32", *overrides])
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    return read_run(folder)


def save_plain(model: torch.nn.Module, folder: Path, step: int = 3) -> None:
    last = folder / "checkpoints" / "qat" / "last.ckpt"
    last.parent.mkdir(parents=True)
    torch.save({"state_dict": {f"model.{n}": t for n, t in model.state_dict().items()}, "global_step": step}, last)


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors*")}


@pytest.mark.parametrize("targets", ["null", "[routed_experts,o_proj]"])
def test_adapters_are_merged_as_the_run_merges_them(tmp_path, tiny_folder, targets):
    folder = tmp_path / "run"
    run = make_run(folder, f"model.path={tiny_folder}", "method/lora=default", f"method.lora.targets={targets}")
    model = load_model(run.model)
    prepare(model, run.recipe)
    run.methods["lora"].attach(run, model)
    for wrapper in adapters.adapters(model):
        torch.nn.init.normal_(wrapper.lora_B["default"].weight, std=0.05)
    save_plain(model, folder)
    found = export_saved(folder)
    assert found.proof.ok
    adapters.merge(model)
    alone = export(model, tmp_path / "alone", recipe=run.recipe, dtype=torch.float32)
    assert hashes(found.result.folder) == hashes(alone.folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("qdeepseek.train.callbacks.lora.LoRA", "qdeepseek.train.none"))
    with pytest.raises(ConfigError, match=r"method\.lora"):
        export_saved(folder)


def test_a_raised_level_is_refused(tmp_path, tiny_folder):
    folder = tmp_path / "run"
    run = make_run(folder, f"model.path={tiny_folder}")
    model = load_model(run.model)
    prepare(model, run.recipe)
    next(quantized_tensors(model)).quantizer.level = "int8"
    save_plain(model, folder)
    with pytest.raises(ConfigError, match="1 quantisers stand above their target"):
        export_saved(folder)


BIG = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "n_routed_experts": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 128, "num_nextn_predict_layers": 0,
}  # fmt: skip
MEASURE = """
import json, sys
from pathlib import Path
import torch
from qdeepseek.train.export_saved import export_saved
export_saved(Path(sys.argv[2]))  # imports and threads are no part of what is measured
def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
export_saved(Path(sys.argv[1]))
print(json.dumps({"grown": status("VmHWM") - before}))
"""


def write_stage3(folder: Path, model: torch.nn.Module, ranks: int) -> int:
    """DeepSpeed's files for a model on the meta device, with the same noise in every weight; returns their bytes."""
    place = folder / "checkpoints" / "qat" / "last.ckpt" / "checkpoint"
    place.mkdir(parents=True)
    noise = torch.randn(2**22)
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    buffers = {f"model.{n}": torch.ones(b.shape) for n, b in model.named_buffers() if n in model.state_dict()}
    sizes = [-(-p.numel() // ranks) for p in parameters.values()]
    flat = torch.cat([noise.repeat(-(-size // len(noise)))[:size] for size in sizes])
    for rank in range(ranks):
        module = {name: torch.empty(0, dtype=p.dtype) for name, p in parameters.items()} | buffers
        state = {
            "module": module, "buffer_names": list(buffers), "shared_params": {}, "global_step": 1,
            "param_shapes": [{name: p.shape for name, p in parameters.items()}],
        }  # fmt: skip
        torch.save(state, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizer = {"optimizer_state_dict": {"partition_count": ranks, "fp32_flat_groups": [flat]}}
        torch.save(optimizer, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (place.parent / "complete").touch()
    return flat.nbytes * ranks


def write_run(folder: Path, config: dict) -> int:
    """A run whose checkpoint is that of two ranks; returns the bytes of it."""
    scratch = json.dumps({"model_type": "deepseek_v3", **config}).replace(chr(34), "")
    overrides = ["model.path=null", f"model.scratch={scratch}"]
    run = make_run(folder, *overrides, "export.max_shard_bytes=10_000_000", "export.dtype=bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**config))
    prepare(model, run.recipe)
    return write_stage3(folder, model, 2)


def test_partitions_with_padding_and_across_groups(tmp_path):
    """Three ranks, sizes that they do not divide, parts that begin in one flat tensor and end in the next."""
    weights = {f"model.w{size}": torch.randn(size) for size in (7, 1, 10, 12, 2)}
    parts = [-(-len(w) // 3) for w in weights.values()]
    place = tmp_path / "checkpoint"
    place.mkdir()
    for rank in range(3):
        padded = [torch.nn.functional.pad(w, (0, 3 * n - len(w)), value=99.0) for w, n in zip(weights.values(), parts)]
        flat = torch.cat([w[rank * n : (rank + 1) * n] for w, n in zip(padded, parts)])
        state = {
            "module": {name: torch.empty(0) for name in weights}, "buffer_names": [], "global_step": 1,
            "shared_params": {"model.tied": "model.w7"},
            "param_shapes": [{n: w.shape} for n, w in weights.items()],
        }  # fmt: skip
        torch.save(state, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        groups = {"partition_count": 3, "fp32_flat_groups": list(flat.split(5))}
        torch.save({"optimizer_state_dict": groups}, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (tmp_path / "complete").touch()
    found = open_checkpoint(tmp_path).tensors
    assert torch.equal(found["tied"].read(), weights["model.w7"])
    for name, whole in weights.items():
        for begin in range(len(whole) + 1):
            for end in range(begin, len(whole) + 1):
                assert torch.equal(found[name.removeprefix("model.")].read(begin, end), whole[begin:end])


@pytest.mark.slow
def test_exporting_a_large_partitioned_checkpoint_takes_little_memory(tmp_path):
    total = write_run(tmp_path / "run", BIG)
    write_run(tmp_path / "small", {**BIG, "num_hidden_layers": 2, "n_routed_experts": 2})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "run"), str(tmp_path / "small")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = json.loads(done.stdout.splitlines()[-1])["grown"]
    print(f"checkpoint {total / 1e6:.0f} MB, peak +{grown / 1e6:.0f} MB")
    assert total > 150e6 and grown < total / 4
