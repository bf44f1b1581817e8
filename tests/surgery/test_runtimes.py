"""Kernel rules on shapes whose answer was worked out by hand: DeepSeek-V2-Lite and R1-Distill-Qwen-7B."""

from dataclasses import replace

import pytest

from qdeepseek.surgery.runtimes import KERNELS, Layer, reason_of, refusals, remedy

KERNEL = {f"{k.runtime} {k.name}": k for k in KERNELS}
LITE_EXPERTS = Layer("experts", 2048, (1408, 1408), "outputs", 128, experts=64, inner=1408)
LITE_DOWN = Layer("down", 10944, (2048,), "inputs", 64)
LITE_KV_A = Layer("kv_a", 2048, (576,), "none", 128)
QWEN_QKV = Layer("q+k+v", 3584, (3584, 512, 512), "outputs", 128)
QWEN_DOWN = Layer("down", 18944, (3584,), "inputs", 128)


@pytest.mark.parametrize(
    ("kernel", "layer", "tp", "group", "taken"),
    [
        # 1408 = 11 · 128 at TP 1; 704 = 5.5 · 128 = 11 · 64 at TP 2; 352 = 5.5 · 64 = 11 · 32 at TP 4
        ("vLLM Marlin", LITE_EXPERTS, 1, 128, True),
        ("vLLM Marlin", LITE_EXPERTS, 2, 128, False),
        ("vLLM Marlin", LITE_EXPERTS, 2, 64, True),
        ("vLLM Marlin", LITE_EXPERTS, 2, 32, True),
        ("vLLM Marlin", LITE_EXPERTS, 4, 64, False),
        ("vLLM Marlin", LITE_EXPERTS, 4, 32, False),
        ("vLLM Marlin with padding", LITE_EXPERTS, 4, 32, True),
        ("vLLM Marlin with padding", LITE_EXPERTS, 4, 64, False),
        ("vLLM WNA16 MoE", LITE_EXPERTS, 4, 32, True),
        ("vLLM WNA16 MoE", LITE_EXPERTS, 2, 128, False),
        ("SGLang Marlin", LITE_EXPERTS, 2, 64, True),
        # 10944 = 171 · 64 = 85.5 · 128: Marlin's K % 128 refuses it whatever the group
        ("vLLM Marlin", LITE_DOWN, 1, 64, False),
        ("vLLM Marlin", LITE_DOWN, 1, 32, False),
        ("vLLM Marlin with padding", LITE_DOWN, 1, 64, True),
        ("vLLM Marlin with padding", LITE_DOWN, 1, 128, False),
        ("vLLM Marlin with padding", LITE_DOWN, 2, 64, False),  # 5472 = 85.5 · 64 = 171 · 32
        ("vLLM Marlin with padding", LITE_DOWN, 2, 32, True),
        ("vLLM Machete", LITE_DOWN, 1, 64, True),
        ("vLLM Machete", LITE_DOWN, 1, 32, False),
        ("vLLM GPTQ loader", LITE_DOWN, 4, 32, False),  # 2736 = 85.5 · 32
        # 576 = 9 · 64 = 4.5 · 128
        ("vLLM Marlin", LITE_KV_A, 8, 128, True),
        ("vLLM Machete", LITE_KV_A, 1, 128, False),
        # Qwen 7B: N = 4608 = 36 · 128 at TP 1; 4 key heads and 28 query heads at TP 4: 896 + 2 · 128 = 1152 = 9 · 128
        ("vLLM Machete", QWEN_QKV, 4, 128, True),
        ("vLLM Marlin", QWEN_QKV, 4, 128, True),
        # 18944 = 148 · 128; at TP 8 2368 = 18.5 · 128 = 37 · 64
        ("vLLM Marlin", QWEN_DOWN, 4, 128, True),
        ("vLLM Marlin", QWEN_DOWN, 8, 64, False),
        ("vLLM Machete", QWEN_DOWN, 8, 64, True),
        ("vLLM Machete", QWEN_DOWN, 8, 128, False),
        # blocks: 10944 = 342 · 32; 1408 = 44 · 32; 18944 = 74 · 256
        ("llama.cpp Q4_0", LITE_DOWN, 8, 64, True),
        ("llama.cpp Q4_0", LITE_EXPERTS, 1, 128, True),
        ("llama.cpp Q4_0", LITE_DOWN, 1, 16, False),
        ("llama.cpp Q4_K", LITE_DOWN, 1, 64, False),
        ("OpenVINO CPU", LITE_DOWN, 8, 64, True),
        ("OpenVINO CPU", LITE_DOWN, 1, 128, False),
    ],
)
def test_shapes(kernel, layer, tp, group, taken):
    assert (reason_of(KERNEL[kernel], replace(layer, group_size=group), tp) is None) is taken


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        ("vLLM Marlin", {"bits": 2}, "2-bit weights, the kernel has 4 and 8 bits"),
        ("vLLM Marlin", {"bits": 8, "symmetric": False}, "8-bit weights with zero points"),
        ("vLLM Marlin", {"input_bits": 8}, "8-bit activations, the kernel has 16 bits"),
        ("vLLM Marlin", {"group_size": 256}, "group 256, the kernel has (-1, 32, 64, 128)"),
        ("vLLM Marlin", {"inputs": 3586, "group_size": -1}, "K 3586 on a rank is no multiple of 128"),
        ("vLLM Marlin", {"pieces": (3584, 512, 500)}, "N 4596 on a rank is no multiple of 64"),
        ("vLLM Exllama", {}, "served in bfloat16, the kernel has float16"),
        ("vLLM Exllama", {"dtype": "float16", "symmetric": False}, "zero points"),
        ("vLLM AWQ", {"dtype": "float16", "bits": 8}, "8-bit weights, the kernel has 4 bits"),
        ("vLLM AWQ", {"dtype": "float16", "group_size": -1}, "one scale a row, the format wants groups"),
        ("vLLM WNA16 MoE", {}, "no kernel for dense layers"),
        ("llama.cpp Q4_0", {"symmetric": False}, "zero points: Q4_1's minimum is fp16 and inexact"),
        ("OpenVINO CPU", {"group_size": 2}, "group 2 is below 4"),
        ("OpenVINO CPU", {"bits": 3}, "3-bit weights, the plugin has 4 and 8 bits"),
    ],
)
def test_reasons(kernel, change, reason):
    assert reason_of(KERNEL[kernel], replace(QWEN_QKV, **change), 1).startswith(reason)


def test_a_dimension_that_ranks_do_not_divide():
    assert "not divided by the tensor parallelism" in reason_of(KERNEL["vLLM Marlin"], QWEN_QKV, 3)


@pytest.mark.parametrize(
    ("kernel", "layer", "tp", "expected"),
    [
        ("vLLM Marlin", LITE_EXPERTS, 2, "group 64 or 32"),
        ("vLLM Marlin", replace(LITE_EXPERTS, group_size=32), 4, "tp 2"),
        ("vLLM Marlin", LITE_EXPERTS, 4, "tp 2, group 64 or 32"),
        ("vLLM Marlin", LITE_DOWN, 1, "keep it in bf16"),
        ("vLLM Machete", replace(LITE_DOWN, group_size=32), 1, "group 64"),
        ("vLLM Machete", replace(LITE_DOWN, group_size=32), 2, "tp 1, group 64"),
        ("vLLM Exllama", LITE_DOWN, 1, "serve in float16"),
        ("vLLM Exllama", LITE_DOWN, 2, "serve in float16, group 32"),
        ("vLLM Machete", LITE_EXPERTS, 1, "another kernel takes it"),
    ],
)
def test_remedies_work(kernel, layer, tp, expected):
    assert remedy(KERNEL[kernel], layer, tp) == expected
    assert any(r.remedy == expected for r in refusals(KERNEL[kernel], (layer,), tp))


def test_every_rule_names_its_source():
    for kernel in KERNELS:
        project, version, file = kernel.source.split(" ")[:3]
        assert "/" in project and len(version) == 12 and "/" in file
