"""The profile's table: every moment of a step is in exactly one category, and kernels are classified by name, launch and phase."""

import ast
from pathlib import Path

import pytest

from baton.training.monitoring.peak_flops import Utilisation, device_peak
from baton.training.monitoring.profile_categories import CATEGORIES, RULES, category, name_rules, scope_rules
from baton.training.monitoring.profile_table import tabulate

ROOT = Path(__file__).resolve().parent.parent.parent
HOST, BACKWARD, STREAM, OTHER = 1, 2, 7, 13


def host(name, ts, end, cat="cpu_op", tid=HOST, **args):
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": end - ts, "args": args}


def mark(part, ts):
    return host(f"mark: {part}", ts, ts + 0.5, cat="user_annotation")


def kernel(name, ts, end, correlation, tid=STREAM):
    return {"ph": "X", "cat": "kernel", "name": name, "tid": tid, "ts": ts, "dur": end - ts, "args": {"correlation": correlation}}


def launch(ts, correlation, tid=HOST, cat="cuda_runtime"):
    return host("cudaLaunchKernel", ts, ts + 1, cat=cat, tid=tid, correlation=correlation)


def a_step():
    """Microseconds 0 to 1000: data until 100, forward until 300, backward until 500, the update until 800, then a callback."""
    events = [
        host("ProfilerStep#6", 0, 1000, cat="user_annotation"),
        mark("data", 100),
        # forward: a norm, a product, a recurrence, in a kernel whose name the norm's has as well
        host("_RMSNorm", 110, 130),
        launch(115, 1, cat="cuda_driver"),
        host("aten::mm", 140, 150),
        launch(145, 2),
        host("recurrence: selective_scan", 160, 200, cat="user_annotation"),
        host("_Scan", 165, 190),
        launch(170, 3, cat="cuda_driver"),
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "tid": HOST, "ts": 165, "id": 1},
        mark("forward", 300),
        # backward, on its own thread: known by the forward operator alone
        host("autograd::engine::evaluate_function: NewBackward", 310, 350, tid=BACKWARD),
        host("NewBackward", 311, 349, tid=BACKWARD),
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "tid": BACKWARD, "ts": 311, "id": 1},
        launch(320, 4, tid=BACKWARD),
        launch(340, 5, tid=BACKWARD),
        mark("backward", 500),
        launch(510, 6),
        mark("optimizer", 800),
        launch(850, 7),
        kernel("backward_kernel", -50, -10, 99),  # of the step before
        kernel("forward_kernel", 120, 180, 1),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 180, 280, 2),
        kernel("forward_kernel", 280, 330, 3),
        kernel("backward_kernel", 350, 450, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 520, 5, tid=OTHER),
        kernel("void at::native::multi_tensor_apply_kernel<...>", 520, 780, 6),
        kernel("strange_kernel", 860, 900, 7),
    ]
    return events


def test_every_moment_of_a_step_is_in_one_category():
    table = tabulate(a_step(), on_gpu=True)
    assert table.categories == pytest.approx(
        {
            "data": 0.100,  # nothing runs, and the host waits for its batch
            "norm": 0.060,
            "matmul": 0.100,
            "scan": 0.150,  # the backward pass of it too, by its forward operator
            "exchange": 0.070,  # what is not behind the backward kernel
            "optimizer": 0.260,
            "unclassified": 0.040,
            "idle": 1.000 - 0.780,
            "convolution": 0.0,
            "loss": 0.0,
            "elementwise": 0.0,
        }
    )
    assert sum(table.categories.values()) == pytest.approx(table.ms)
    assert table.ms == 1.0
    assert table.hidden_ms == pytest.approx(0.050)
    text = "\n".join(table.lines())
    assert "unclassified: 0.04 ms in 1 calls of strange_kernel" in text
    idle = {kernel.name: (pytest.approx(kernel.ms), kernel.calls) for kernel in table.kernels["idle"]}
    assert idle == {
        "callbacks: cudaLaunchKernel": (0.080, 1),
        "forward: _RMSNorm": (0.020, 1),
        "a kernel that was launched in time": (0.020, 1),
    }
    assert "idle: 0.02 ms in 1 gaps before forward: _RMSNorm" in text
    assert {kernel.name for kernel in table.kernels["scan"]} == {"forward_kernel", "backward_kernel"}


def test_what_comes_after_a_steps_last_part_is_not_the_next_steps_data():
    second = [{**e, "ts": e["ts"] + 1000, "args": {k: v + 100 for k, v in e.get("args", {}).items()}} for e in a_step()]
    second = [
        {**e, **({"id": 2} if "id" in e else {}), **({"name": "ProfilerStep#7"} if "Step" in e["name"] else {})} for e in second
    ]
    table = tabulate([*a_step(), *(e for e in second if e["ts"] >= 1000)], on_gpu=True)
    assert [step["step"] for step in table.steps] == [6, 7]
    assert table.steps[0]["categories"] == pytest.approx(table.steps[1]["categories"])
    assert table.categories["unclassified"] == pytest.approx(0.040)


def test_on_a_cpu_the_innermost_operator_counts():
    events = [
        host("ProfilerStep#3", 0, 100, cat="user_annotation"),
        mark("data", 20),
        host("recurrence: short_conv", 30, 60, cat="user_annotation"),
        host("aten::mul", 35, 55),
        host("aten::linear", 60, 80),
        host("aten::addmm", 62, 78),
        host("exchange: waiting", 80, 95, cat="user_annotation"),
        host("aten::mul", 0, 100, tid=BACKWARD),  # another thread's
    ]
    found = tabulate(events, on_gpu=False).categories
    assert found == pytest.approx(
        {**dict.fromkeys(CATEGORIES, 0.0), "data": 0.020, "convolution": 0.020, "matmul": 0.020, "exchange": 0.015, "idle": 0.025}
    )


def test_a_trace_without_steps_or_without_kernels_is_said_to_be_one():
    with pytest.raises(ValueError, match="no whole step"):
        tabulate([host("aten::mul", 0, 1)], on_gpu=False)
    with pytest.raises(ValueError, match="no kernels"):
        tabulate([host("ProfilerStep#3", 0, 100, cat="user_annotation")], on_gpu=True)


@pytest.mark.parametrize(
    ("name", "inside", "expected"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "aten::mm", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "", "matmul"),
        ("void cutlass::device_kernel<...>", "recurrence: gated_linear_attention", "scan"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "", "scan"),
        ("diagonal_scan_backward_kernel", "", "scan"),
        ("short_conv_backward_kernel", "", "convolution"),
        ("rotary_kernel", "_Rotary", "elementwise"),
        ("embedding_sum_runs_kernel", "_EmbeddingBackward", "elementwise"),
        ("forward_kernel", "", "unclassified"),
        ("cross_entropy_sums_kernel", "_LinearCrossEntropy", "loss"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NNT", "_LinearCrossEntropy", "matmul"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda>", "aten::silu", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "phase: data", "data"),
        ("Memcpy DtoD (Device -> Device)", "phase: optimizer", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "phase: optimizer", "exchange"),
    ],
)
def test_kernels_are_known_by_what_is_most_certain(name, inside, expected):
    assert category(name_rules(name) | scope_rules(inside)) == expected


def definitions(packages):
    """Names of the Triton kernels and of the autograd functions that the packages define."""
    kernels, functions = set(), set()
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                    kernels |= {node.name} if any("jit" in ast.unparse(one) for one in node.decorator_list) else set()
                if isinstance(node, ast.ClassDef):
                    functions |= {node.name} if any(ast.unparse(one).endswith("Function") for one in node.bases) else set()
    return kernels, functions


def test_rules_name_all_kernels_and_autograd_functions_and_none_that_do_not_exist():
    """A function that is renamed or new would silently be counted as another category, or as unclassified."""
    kernels, functions = definitions(["kernels", "models", "parallel", "training"])
    assert len(kernels) > 30
    assert len(functions) > 15
    prefixes = [prefix for rule in RULES for prefix in rule.kernels]
    assert [prefix for prefix in prefixes if not any(name.startswith(f"{prefix}_") for name in kernels)] == [], (
        "no kernel has these"
    )
    assert {name for name in kernels if not any(name.startswith(f"{prefix}_") for prefix in prefixes)} == set(), "in no rule"
    assert {name for rule in RULES for name in rule.functions} == functions


def test_megatrons_communication_is_known():
    from megatron.core.tensor_parallel import mappings

    regions = [name for name in vars(mappings) if name.startswith("_") and name.endswith("Region")]
    assert len(regions) > 6
    assert {category(name_rules(f"{name}{suffix}")) for name in regions for suffix in ("", "Backward")} == {"exchange"}


def test_utilisation_names_its_peak_and_shares_it_among_devices():
    peak = device_peak("NVIDIA H200", "bfloat16")
    assert peak.tflops == 989
    used = Utilisation(parameters=10**9, flops=8e9, tokens=1000, seconds=0.01, devices=2, peak=peak)
    assert used.mfu_6n == pytest.approx(6e9 * 1e5 / (2 * 989e12))
    assert used.mfu_model == pytest.approx(8e9 * 1e5 / (2 * 989e12))
    assert "989 TFLOP/s (NVIDIA H200, dense bfloat16, data sheet)" in str(used)
    assert device_peak("CPU", "float32") is None
    assert device_peak("CPU", "float32", 0.1).tflops == 0.1
