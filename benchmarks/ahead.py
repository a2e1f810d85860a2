"""Compiles the kernels that the benchmarks launch, on a machine without a GPU: ours, the candidates of `baton tune`, and fla's.

Kernels are compiled into Triton's cache (TRITON_CACHE_DIR). The cache can be used on another machine at the same path and with the
same build of Triton, which differs between Python versions; otherwise use archive.py. GPU time is then spent on measuring only.
fla times all configurations of its kernels to find the fastest, so all of them are compiled; the timing remains.

    TRITON_CACHE_DIR=/tmp/cache python benchmarks/ahead.py train:mamba-1.4b:8x2048 tune:bmojo-1.4b op:gsa peer:gsa:8x2048

train: a model of train_step.py, a shape of its, and settings of the run; tune: such a model, or a name in configs/models; exchange:
such a name, of exchange.py, and its ranks and tokens; op: a kind of matrix_gpu.py, ours; peer: the same by fla, at all sizes or at
one, or model: fla's whole GSA.
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.tensor  # here, because its annotations want the Generator that `no_generators` takes away
import yaml
from archive import pack, record_cache_keys
from torch import Tensor
from triton import knobs

from baton.kernels.compile import aot
from baton.kernels.compile.aot import META, Compiled, Target, compiling
from baton.kernels.compile.autotune import _SETUPS, STEPS, _fits
from baton.launcher.config import RunConfig, load
from baton.training.kernel_tools.aot_compile import compile_run_kernels
from baton.training.kernel_tools.autotune import launch_requests

H200 = {"max_shared_mem": 232448, "multiprocessor_count": 132}
SEGMENT = 16384


def run_of(model: str, settings: list[str], rows: int, sequence_length: int) -> RunConfig:
    """As train_step.py's, of two micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        training: dict[str, Any] = {
            "steps": 10,
            "sequence_length": sequence_length,
            "micro_batch_size": rows,
            "global_batch_tokens": 2 * rows * sequence_length,
        }
        values = {
            "name": "ahead",
            "directory": f"{folder}/run",
            "model": model,
            "data": {"path": "nowhere", "tokenizer": "nowhere.model"},
            "training": training | {"optimizer": {"lr": 1e-4}},
        }
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        config = load(path, settings)
        if sequence_length > SEGMENT and not any(mixer.state_grows for mixer in config.model.mixers.values()):
            settings = [*settings, f"training.bptt={{mode: exact, segment: {SEGMENT}}}"]
        return load(path, settings)


def train(target: Target, model: str, shape: str, *settings: str) -> Compiled:
    from train_step import MODELS

    rows, sequence_length = map(int, shape.split("x"))
    name, own = MODELS.get(model, (model, []))
    config = run_of(name, [*own, *settings], rows, sequence_length)
    return compile_run_kernels(config.model, config.training, config.layout, target)


def tune(target: Target, model: str) -> Compiled:
    """Candidates of each step beside the configuration in use: the next step's are others where one of them is taken."""
    from train_step import MODELS

    config, found = run_of(*MODELS.get(model, (model, [])), 8, 2048), Compiled("")
    for request in launch_requests(config.model, config.training, config.layout, target):
        for step in STEPS[request.kernel]:
            with compiling(target) as compiled:
                call, _, used = _SETUPS[request.kernel](request, META, torch.bfloat16)
                for values in itertools.product(*step.values()):
                    config = replace(used, **dict(zip(step, values, strict=True)))
                    if _fits(config):
                        call(config)
            found.kernels.extend(compiled.kernels)
            found.new.extend(compiled.new)
    return found


def op(target: Target, kind: str) -> Compiled:
    from matrix_gpu import CASES, LIMITS, gate_of, run, state_of

    with compiling(target) as compiled, on_meta():
        for case in [case for case in CASES if case.kind.startswith(kind)]:
            leaves = inputs_on_meta(case)
            both(lambda case=case, **given: run(case, given)[0], leaves)
            small, pos = gate_of(case)
            for dtype in LIMITS:
                leaves = inputs_on_meta(small, dtype)
                with no_generators():
                    leaves |= {name: x.requires_grad_() for name, x in state_of(small, leaves).items()}
                outputs = run(small, leaves, pos)
                torch.autograd.grad(outputs, list(leaves.values()), [torch.empty_like(y) for y in outputs])
    return compiled


def peer(target: Target, kind: str, shape: str | None = None) -> Compiled:
    from matrix_gpu import CASES, peer_of

    with compiling(target) as compiled, autotuning_by_compiling(), on_meta():
        if kind == "model":
            fla_model()
            return compiled
        for case in [case for case in CASES if case.kind.startswith(kind) and shape in (None, f"{case.batch}x{case.length}")]:
            name, call, back = peer_of(case)
            if call is None:
                raise SystemExit(f"{name} is not here")
            with contextlib.nullcontext() if back else torch.no_grad():
                both(call, inputs_on_meta(case), back)
    return compiled


def inputs_on_meta(case: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    from matrix_gpu import inputs_of

    with no_generators():
        return {name: x.detach().requires_grad_() for name, x in inputs_of(case, dtype).items()}


@contextlib.contextmanager
def no_generators() -> Iterator[None]:
    """Within it torch.Generator makes one that is not a GPU's."""
    generator = torch.Generator
    torch.Generator = lambda device: generator()  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.Generator = generator  # type: ignore[misc]


def both(call: Callable[..., Tensor], leaves: dict[str, Tensor], back: bool = True) -> None:
    y = call(**leaves)
    if back:
        torch.autograd.grad(y, list(leaves.values()), torch.empty_like(y), allow_unused=True)


def fla_model() -> None:
    """A layer of GSA 1.3B, without its loss, which insists on a GPU."""
    from fla.models.gsa import GSAConfig, GSAForCausalLM

    config = GSAConfig(
        hidden_size=2048, num_hidden_layers=1, num_heads=4, num_slots=64, gate_logit_normalizer=8, vocab_size=32000,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = GSAForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    model(input_ids=torch.empty(8, 2048, dtype=torch.int64)).logits.sum().backward()


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """What is made, also "on cuda", is on the meta device, and torch.cuda answers for an H200."""
    from torch.overrides import TorchFunctionMode

    class Meta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = META
            kwargs.pop("generator", None)
            return func(*args, **kwargs)

    answers = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H200",
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132, major=9, minor=0),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    before = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        with META, Meta():
            yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


@contextlib.contextmanager
def autotuning_by_compiling() -> Iterator[None]:
    """Triton's autotuner launches each configuration once, which compiles it, and takes the first; that choice, which nothing was
    measured for, is not kept where a GPU's would be."""
    from triton.runtime.autotuner import Autotuner

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        try:
            self.fn.run(*args, **dict(meta, **config.all_kwargs()))
        except Exception as error:  # a configuration that cannot be compiled is one that is not chosen
            print(f"  {self.base_fn.__name__}: {config}: {type(error).__name__}", file=sys.stderr)
            return [float("inf")] * 3
        return [1.0] * 3

    driver: Any = aot._Driver
    driver.utils = SimpleNamespace(get_device_properties=lambda _: H200)
    driver.get_benchmarker = lambda self: None
    driver.get_active_torch_device = lambda self: META
    before = Autotuner._bench, Autotuner.check_disk_cache
    Autotuner._bench, Autotuner.check_disk_cache = bench, lambda self, key, configs, measure: bool(measure())
    try:
        with on_meta():  # it looks at the device as it is imported
            import fla.utils
            import fla.utils.decorators
            import fla.utils.hardware

            for module in (fla.utils, fla.utils.decorators, fla.utils.hardware):
                module.custom_device_ctx = lambda index: contextlib.nullcontext()
            fla.utils.hardware.get_all_max_shared_mem = lambda: [H200["max_shared_mem"]]
        yield
    finally:
        Autotuner._bench, Autotuner.check_disk_cache = before


def exchange(target: Target, model: str, ranks: str = "2", tokens: str = "16384") -> Compiled:
    from exchange import launch

    with compiling(target) as compiled:
        launch(model, int(ranks), int(tokens))
    return compiled


KINDS: dict[str, Callable[..., Compiled]] = {"train": train, "tune": tune, "op": op, "peer": peer, "exchange": exchange}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = "train:MODEL:SHAPE[:SETTING...], tune:MODEL, exchange:MODEL[:RANKS:TOKENS], op:KIND, peer:KIND[:SHAPE] or peer:model"
    parser.add_argument("what", nargs="+", help=kinds)
    parser.add_argument(
        "--device", default="NVIDIA H200", help="as CUDA names it, for the table of launch configurations (default NVIDIA H200)"
    )
    parser.add_argument("--archive", type=Path, help="also pack all of it for another installation: see archive.py")
    arguments = parser.parse_args()
    with record_cache_keys() as keys:
        for what in arguments.what:
            kind, *rest = what.split(":")
            if kind not in KINDS:
                parser.error(f"{what!r} is of none of {', '.join(KINDS)}")
            began = time.monotonic()
            compiled = KINDS[kind](Target(90, arguments.device), *rest)
            seconds = time.monotonic() - began
            print(f"{what}: {len(compiled.kernels)} kernels, {len(compiled.new)} new, {seconds:.0f} s", flush=True)
    if arguments.archive is not None:
        count = pack(keys, Path(knobs.cache.dir), arguments.archive)
        print(f"{arguments.archive}: {count} kernels, {arguments.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
