"""Streaming a folder of several shards needs less than two of them in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARD = 60_000_000

COMMON = """
import json, sys
from pathlib import Path
import torch, transformers, yaml
from qdeepseek.export.compressed_tensors import export
from qdeepseek.surgery import Recipe, prepare
folder = Path(sys.argv[1])
config = transformers.DeepseekV3Config(
    vocab_size=1024, hidden_size=1024, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=32, num_experts_per_tok=2,
    n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=256, kv_lora_rank=256, qk_nope_head_dim=64,
    qk_rope_head_dim=32, v_head_dim=64, max_position_embeddings=128, num_nextn_predict_layers=0,
)
"""

WRITE = (
    COMMON
    + """
from qdeepseek.export import names
from qdeepseek.export.writer import ShardWriter
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
layout, shards = names.layout_of("deepseek_v3"), ShardWriter(folder, int(sys.argv[2]))
torch.manual_seed(0)
for name, tensor in model.state_dict().items():
    if not names.is_fused(name):
        shards.add(name, torch.randn(tensor.shape, dtype=torch.bfloat16))
        continue
    for expert in range(tensor.shape[0]):
        for part in names.parts_of(name):
            rows = names.rows_of(part, tensor[expert])
            module = names.expert_module(name, expert, part, layout)
            shards.add(f"{module}.weight", torch.randn(rows.shape, dtype=torch.bfloat16))
shards.finish()
"""
)

EXPORT = (
    COMMON
    + """
recipe = Recipe.from_config(yaml.safe_load(Path(sys.argv[2]).read_text()))
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
prepare(model, recipe)
small = torch.randn(64, 64)
small @ small  # the libraries' own buffers are not the exporter's
def peak():  # of this program alone: ru_maxrss would begin at the size of the process that started it
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before = peak()
export(model, folder.parent / "export", recipe=recipe, weights=folder, max_shard_bytes=int(sys.argv[3]))
print(json.dumps({"grown": peak() - before}))
"""
)


def child(script: str, *arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_peak_memory_is_under_two_shards(tmp_path):
    """300 MB of bf16 weights in shards of 60 MB, among them routed experts, exported in one process."""
    import json

    from qdeepseek.export.verify import verify

    folder = tmp_path / "weights"
    folder.mkdir()
    child(WRITE, folder, SHARD)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    total, largest = sum(sizes), max(sizes)
    assert len(sizes) > 4 and total > 200e6
    grown = json.loads(child(EXPORT, folder, ROOT / "conf" / "quant" / "w4a16_g32.yaml", SHARD))["grown"]
    print(f"weights {total / 1e6:.0f} MB in {len(sizes)} shards of {largest / 1e6:.0f} MB, peak +{grown / 1e6:.0f} MB")
    assert grown < 2 * largest, f"peak grew by {grown / 1e6:.0f} MB, two shards are {2 * largest / 1e6:.0f} MB"
    report = verify(tmp_path / "export", reference=False)
    assert report.ok, str(report)
