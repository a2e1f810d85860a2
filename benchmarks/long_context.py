"""Exact backpropagation through time on GPUs: peak memory and time per token, compared with a plain backward pass, and with context
parallelism.

The gates compare the loss and the gradient norm of the same step. A case that does not fit in memory with a plain backward pass is
reported as out of memory. Longer exact steps are also compared with what `baton plan` says of them. Times are those of whole steps
(forward, backward, update), the minimum of a few.

    python benchmarks/long_context.py [--model mamba-130m] [--contexts 32768,131072] [--segment 16384] [--ranks 4] [--steps 3]
    python benchmarks/long_context.py --contexts 131072 --ranks 4 --ranks-context 4194304
    python benchmarks/long_context.py --model mamba-1.4b --contexts 32768,131072,524288,1048576 --steps 1

With more ranks than GPUs the ranks share them in turns and send through sockets: their losses count, their times are not shown.
"""

import argparse
import json
import os
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import yaml
from report import Report, worst
from scaling import cluster_of

from baton.data_pipeline.packing import Batch
from baton.launcher.cluster import load_cluster
from baton.launcher.config import RunConfig
from baton.launcher.planner.plan import make_plan
from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.pipeline import StepSchedule
from baton.training.build import TrainState, build, make_deterministic
from baton.training.config import Recompute, TrainingConfig
from baton.training.optimizer_config import OptimizerConfig
from baton.training.step.executor import StepExecutor

NEAR = 1e-3  # relative difference of losses and norms, bfloat16
TIMEOUT_S = 90  # of a message between ranks


def settings(
    sequence_length: int, segment: int | None, *, recompute: Recompute = "none", offload_kv: bool = False
) -> TrainingConfig:
    bptt = None if segment is None else {"mode": "exact", "segment": segment}
    return TrainingConfig(
        steps=10,
        sequence_length=sequence_length,
        global_batch_tokens=sequence_length,
        compute_dtype="bfloat16",
        recompute=recompute,
        offload_kv=offload_kv,
        bptt=bptt,
        optimizer=OptimizerConfig(lr=1e-4),
    )


def batch_of(model: ModelConfig, training: TrainingConfig, mesh: meshes.Mesh, documents: int) -> Batch[torch.Tensor]:
    """Packed documents, as many in the sequence, this rank's spans of the segments."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab_size or 0, (1, training.sequence_length + 1), generator=generator)
    pos = torch.arange(training.sequence_length)[None] % -(-training.sequence_length // documents)
    parts = [tokens[:, :-1], tokens[:, 1:], pos]
    spans = [x.view(1, training.segments, mesh.layout.context, -1)[:, :, mesh.context_rank].reshape(1, -1) for x in parts]
    tokens, labels, pos = (x.contiguous().to(mesh.device) for x in spans)
    return Batch(tokens, labels, pos.to(torch.int32))


def measure(train_state: TrainState, training: TrainingConfig, documents: int, steps: int, warm: bool) -> dict[str, float] | None:
    """Loss and norm, bytes at the peak, seconds per token; None: out of memory. Steps have a learning rate of 0, so that all begin
    with the same values. warm: whether this process has done such steps before, so that the first counts as well."""
    schedule = StepSchedule(training.segments, training.gradient_segments)
    executor = StepExecutor(train_state.model, train_state.engine, train_state.mesh, schedule=schedule)
    batch, seconds = batch_of(train_state.model.config, training, train_state.mesh, documents), []
    torch.cuda.reset_peak_memory_stats()
    try:
        for n in range(max(1, steps + (not warm))):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = executor.step([batch], 0.0)
            torch.cuda.synchronize()
            if n or warm:
                seconds.append(time.perf_counter() - begin)
    except torch.cuda.OutOfMemoryError:
        return None
    found = {"loss": result.loss, "norm": result.grad_norm, "bytes": float(torch.cuda.max_memory_allocated())}
    return found | ({"seconds": min(seconds) / training.sequence_length} if seconds else {})


def rank_main(
    rank: int, ranks: int, folder: str, model: ModelConfig, trainings: list[TrainingConfig], documents: int, steps: int
) -> None:
    """One rank of a sequence group, one training after the other; the first rank writes what it found."""
    gpus = torch.cuda.device_count()
    if ranks > gpus:  # NCCL refuses two ranks of a host on one GPU
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    make_deterministic(trainings[0])
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    mesh = meshes.initialize(LayoutConfig(context=ranks, timeout_s=TIMEOUT_S), device=device, rank=rank, store=store)
    train_state = build(model, trainings[0], mesh)
    found: list[Any] = []
    for training in trainings:
        found.append(measure(train_state, training, documents, steps, warm=bool(found)))
        if found[-1] is None:  # a step that is broken off leaves States behind
            break
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    meshes.shutdown()


def run(ranks: int, model: ModelConfig, trainings: list[TrainingConfig], documents: int, steps: int) -> list[Any]:
    """What each training gives, in processes of their own: what runs out of memory leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, folder, model, trainings, documents, steps), nprocs=ranks)
        found: list[Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def beside_plan(report: Report, case: str, model: ModelConfig, training: TrainingConfig, found: dict[str, float]) -> None:
    """Memory and time of an exact step beside those of `baton plan` for this card."""
    settings = training.model_dump(exclude_unset=True) | {"cuda_graphs": False, "offload_kv": training.offload_kv is True}
    values = {"name": "long", "directory": "runs/long", "model": model, "device": "cuda", "training": settings}
    config = RunConfig.model_validate(values | {"data": {"path": "none", "tokenizer": "none"}})
    plan = make_plan(config, load_cluster(cluster_of(report.provenance["device"])))
    assert plan.speed is not None
    peak, seconds = plan.stages[0].memory.peak / 2**30, found["seconds"] * training.sequence_length
    report.row(case, "peak GiB", found["bytes"] / 2**30, "baton plan", peak, gate=case, higher_is_better=False)
    report.row(case, "seconds a step", seconds, "baton plan", plan.speed.step, gate=case, higher_is_better=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mamba-130m")
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--segment", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=2, help="in a sequence")
    parser.add_argument("--offload-kv", action="store_true", help="keys and values of earlier segments wait in the host's memory")
    parser.add_argument("--steps", type=int, default=3, help="steps timed, after one that warms up")
    parser.add_argument("--ranks", type=int, default=0, help="sequence ranks whose loss at the longest context is compared")
    parser.add_argument("--ranks-context", type=int, help="tokens of a sequence that the ranks then do by themselves")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    report = Report("long_context", device=f"{gpus} x {torch.cuda.get_device_name()}")
    model = ModelConfig(**yaml.safe_load((files("baton.configs") / "models" / f"{arguments.model}.yaml").read_text()))
    contexts = [int(n) for n in arguments.contexts.split(",")]
    in_segments = [settings(length, arguments.segment, offload_kv=arguments.offload_kv) for length in contexts]
    exacts, too_long = run(1, model, in_segments, arguments.documents, arguments.steps), set()
    where = ", one document" if arguments.documents == 1 else ""
    where += ", keys and values offloaded" if arguments.offload_kv else ""
    for n, (sequence_length, exact) in enumerate(zip(contexts, exacts, strict=False)):
        assert exact is not None, f"segments of {arguments.segment} do not fit"
        case = f"{arguments.model} {sequence_length}{where}, exact"
        report.say(f"{case}: {exact['bytes'] / 2**30:.2f} GiB, {exact['seconds'] * 1e6:.2f} us per token")
        if n:
            # tokens are random: whatever the context, an untrained model's mean loss is the same
            near = abs(exact["loss"] - exacts[0]["loss"]) / exacts[0]["loss"]
            report.gate(case, near <= NEAR, f"mean loss is that of {contexts[0]} tokens to {near:.1e} <= {NEAR:g}")
            beside_plan(report, case, model, in_segments[n], exact)
    for sequence_length, exact in zip(contexts, exacts, strict=False):
        for name, recompute in (("plain", "none"), ("plain, recomputed", "full")):
            case = f"{arguments.model} {sequence_length}{where}, {name}"
            if name in too_long:
                report.say(f"{case}: not tried, for less did not fit")
                continue
            (plain,) = run(1, model, [settings(sequence_length, None, recompute=recompute)], arguments.documents, arguments.steps)
            if plain is None:
                too_long.add(name)
                report.say(f"{case}: out of memory; exact segments {exact['bytes'] / 2**30:.1f} GiB")
                continue
            near = {key: abs(exact[key] - plain[key]) / abs(plain[key]) for key in ("loss", "norm")}
            report.gate(case, worst(near.values()) <= NEAR, f"loss to {near['loss']:.1e}, norm to {near['norm']:.1e} <= {NEAR:g}")
            for metric, key, scale in (("peak GiB", "bytes", 2**-30), ("us per token", "seconds", 1e6)):
                report.row(case, metric, exact[key] * scale, name, plain[key] * scale, gate=case, higher_is_better=False)
        report.save()  # should what is left fail, this is not lost
    if arguments.ranks:
        (several,) = run(arguments.ranks, model, [settings(contexts[-1], arguments.segment)], arguments.documents, 0)
        case = f"{arguments.model} {contexts[-1]}, {arguments.ranks} sequence ranks"
        near = {key: abs(several[key] - exact[key]) / abs(exact[key]) for key in ("loss", "norm")}
        report.gate(case, worst(near.values()) <= NEAR, f"loss to {near['loss']:.1e}, norm to {near['norm']:.1e} <= {NEAR:g}")
        report.row(case, "loss", several["loss"], "one rank", exact["loss"], gate=case, higher_is_better=False)
        if arguments.ranks_context:
            case = f"{arguments.model} {arguments.ranks_context}, {arguments.ranks} sequence ranks"
            (longer,) = run(
                arguments.ranks, model, [settings(arguments.ranks_context, arguments.segment)], arguments.documents, arguments.steps
            )
            # tokens are random: whatever the context, an untrained model's mean loss is the same
            near = abs(longer["loss"] - exact["loss"]) / exact["loss"]
            report.gate(case, near <= NEAR, f"mean loss is that of {contexts[-1]} tokens to {near:.1e} <= {NEAR:g}")
            took = "" if "seconds" not in longer else f", {longer['seconds'] * 1e6:.2f} us per token"
            report.say(f"{case}: exact, {longer['bytes'] / 2**30:.2f} GiB per rank{took}")
    report.save()


if __name__ == "__main__":
    main()
