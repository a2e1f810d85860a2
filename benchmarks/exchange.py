"""The cost of context parallelism: forward and backward passes that exchange States between ranks, compared with passes without an
exchange and with an all-to-all over heads.

A pass is timed from a barrier until the slowest rank has finished, so it includes the start of the wavefront, where a rank waits
for its first State, and its end, where other ranks wait for it. The time beyond that of "alone" is exposed communication.

    python benchmarks/exchange.py [--models mamba-1.4b,gsa-1.3b] [--tokens 16384] [--layers N] [--repetitions 10] [--warm-up 3]
    python benchmarks/exchange.py --tiny [--ranks 2]     # on a CPU, in a minute, on sizes that mean nothing; writes no results

Every visible GPU is a context rank. All variants have the same modules, values and tokens, and alternate pass by pass:

    ring        States and their gradients are sent from neighbour to neighbour after a recurrence has run, as in `baton train`
    early       those of linear recurrences are computed and sent earlier (layout.context_comm: early)
    gather      as early, with an all-gather (layout.context_comm: all_gather)
    all-to-all  tokens are exchanged for heads: see exchange_heads.py
    steps       the computation of one rank in a ring, without other ranks: the part of the exposed time that is not waiting
    alone       every rank has tokens of its own and receives no State

Before that, with few layers and tokens, the variants that exchange are compared with the whole sequence on one rank: final hidden
vectors, and the gradients of all parameters, summed over the ranks.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from exchange_heads import HeadExchange, over_heads
from report import Report
from torch import Tensor

from baton.data_pipeline.packing import Batch
from baton.kernels.compile.aot import META
from baton.models.config import ModelConfig
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink
from baton.parallel.linear import fused_grad_accumulation
from baton.parallel.param_layout import named_layouts

FORMS = ("ring", "early", "all_gather", "all-to-all", "steps", "alone")
EXCHANGING = FORMS[:4]
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Of ||a - b|| / ||b||, of each tensor."""
SAME_LOSS = 1e-3  # relative, of means over all tokens, bfloat16
GATE_LAYERS, GATE_TOKENS = 2, 512
TIMEOUT_S = 120
TINY: dict[str, dict[str, Any]] = {"gsa": {"kind": "gsa", "heads": 4, "head_dim": 16, "slots": 8}}


def model_of(name: str, layers: int | None, tiny: bool) -> ModelConfig:
    values = yaml.safe_load((files("baton.configs") / "models" / f"{name}.yaml").read_text())
    if tiny:
        values |= {"d_model": 64, "n_layers": 2, "vocab_size": 512}
        values["mixers"] = {kind: TINY.get(kind, settings) for kind, settings in values["mixers"].items()}
    return ModelConfig(**values | ({"n_layers": layers} if layers else {}))


class Ranked:
    """A model on this rank, a sequence of ranks x tokens in packed documents, and the forms of passes over it."""

    def __init__(self, config: ModelConfig, mesh: meshes.Mesh, tokens: int, dtype: torch.dtype) -> None:
        assert mesh.link is not None
        self.mesh, self.link, self.ranks, self.tokens = mesh, mesh.link, mesh.layout.context, tokens
        with mesh.device:
            self.model = LanguageModel(config, compute_dtype=dtype, link=mesh.link)
        with torch.no_grad():  # on the GPU: values that depend on no device take ten seconds
            for number, (_, parameter, layout) in enumerate(named_layouts(self.model)):
                if not parameter.is_meta:
                    layout.init(parameter, torch.Generator(mesh.device).manual_seed(number))
        count, g = self.ranks * tokens, torch.Generator().manual_seed(1)
        ids, at = torch.randint(config.vocab_size or 0, (1, count + 1), generator=g), torch.arange(count)
        # documents begin within spans and go on over borders
        parts = (ids[:, :-1], ids[:, 1:], (at % (7 * tokens // 10))[None].to(torch.int32))
        self.whole = Batch(*(x.contiguous().to(mesh.device) for x in parts))
        self.span = slice(self.link.rank * tokens, (self.link.rank + 1) * tokens)
        self.own = Batch(*(x[:, self.span].contiguous().to(mesh.device) for x in parts))
        self.heads = HeadExchange(self.link.rank, self.ranks, self.whole.pos)
        self.itself = ContextLink(0, [mesh.rank], mesh.device)
        self.forward_context = ForwardContext(mesh.link)

    @contextmanager
    def form(self, form: str) -> Iterator[None]:
        """Context in which passes use this variant."""
        self.forward_context = ForwardContext({"steps": self.itself, "alone": None, "all-to-all": None}.get(form, self.link))
        if form in ("ring", "early", "all_gather"):
            self.link.exchange = form  # type: ignore[assignment]
        with over_heads(self.heads) if form == "all-to-all" else nullcontext():
            yield

    def run(self, batch: Batch[Tensor]) -> tuple[Tensor, Tensor]:
        """Forward and backward as in a training step, of the mean loss over all ranks' labels; hidden vectors, this rank's part of
        the loss. What is sent may still be on its way."""
        with fused_grad_accumulation():
            hidden, _ = self.model(batch.tokens, batch.pos, None, self.forward_context)
            loss = self.model.loss(hidden, batch.labels) / (self.ranks * self.tokens)
            loss.backward()
        return hidden.detach(), loss.detach()

    # ----------------------------------------------------------------------------------------------------------------- the gate

    def errors(self) -> dict[str, dict[str, float]]:
        """Of the forms that exchange, and of none, against the whole sequence on one rank: ||a - b|| / ||b|| of the hidden vectors
        of all ranks and of each parameter's gradient."""
        with self.form("alone"):
            expected = self.run(self.whole)[0][:, self.span]
        parameters = dict(self.model.named_parameters())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        found = {}
        for form in (*EXCHANGING, "alone"):
            self.model.zero_grad()
            with self.form(form):
                hidden, _ = self.run(self.own)
            self.link.wait()
            squares = torch.stack([norm(hidden - expected), norm(expected)]).square()
            dist.all_reduce(squares)
            of_form = {"hidden": (squares[0] / squares[1]).sqrt()}
            for name, parameter in parameters.items():
                grad, reference = parameter.grad, gradients[name]
                assert grad is not None
                assert reference is not None
                dist.all_reduce(grad)
                of_form[name] = norm(grad - reference) / norm(reference)
            found[form] = {name: float(error) for name, error in of_form.items()}
        return found

    # ---------------------------------------------------------------------------------------------------------------- the times

    def times(self, warm_up: int, repetitions: int) -> dict[str, Any]:
        """By form: ms, of each rank a list of them; loss, the mean over all ranks; messages and bytes, of all ranks, of a pass."""
        device, ms = self.mesh.device, {form: list[float]() for form in FORMS}
        losses, sent = dict[str, Tensor](), dict[str, Tensor]()
        for number in range(warm_up + repetitions):
            for form in FORMS:
                self.link.sent.clear()
                self.heads.messages = self.heads.bytes = 0
                with self.form(form):
                    took, losses[form] = self._timed(lambda: self.run(self.own)[1])
                if number >= warm_up:
                    ms[form].append(took)
                sent[form] = torch.tensor([self.heads.messages, self.heads.bytes], device=device)
                for (what, _), count in self.link.sent.items():
                    sent[form][int(what.endswith("bytes"))] += count
        own = torch.tensor([ms[form] for form in FORMS], dtype=torch.float64, device=device)
        of_ranks = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(of_ranks, own)
        for x in (*losses.values(), *sent.values()):
            dist.all_reduce(x)
        return {
            form: {
                "ms": [x[number].tolist() for x in of_ranks],
                "loss": float(losses[form]),
                "messages": int(sent[form][0]),
                "bytes": int(sent[form][1]),
            }
            for number, form in enumerate(FORMS)
        }

    def _timed(self, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Milliseconds since a barrier, and the result."""
        dist.barrier()
        if self.mesh.device.type == "cpu":
            began = time.perf_counter()
            found = run()
            took = 1e3 * (time.perf_counter() - began)
            self.link.wait()
            return took, found
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        found = run()
        end.record()
        self.link.wait()
        end.synchronize()
        return begin.elapsed_time(end), found


def launch(name: str, ranks: int, tokens: int, gate_dtype: str = "bfloat16") -> None:
    """Launches all kernels on the meta device, for ahead.py."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout, config = LayoutConfig(context=ranks, context_comm="all_gather"), model_of(name, GATE_LAYERS, False)
    for rank in (0, ranks - 1):
        mesh = meshes.initialize(layout, device=META, rank=rank, store=FakeStore())
        for length, dtype in ((GATE_TOKENS, gate_dtype), (tokens, "bfloat16")):
            ranked = Ranked(config, mesh, length, getattr(torch, dtype))
            with ranked.form("alone"):
                ranked.run(ranked.whole)
            for form in FORMS:
                with ranked.form(form):
                    ranked.run(ranked.own)
        meshes.shutdown()


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def rank_main(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    """One rank, all models; the first one writes what was found of each as soon as it is known."""
    tiny = arguments.tiny
    torch.set_num_threads(1)
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    # with channels of both kinds: the link then does either
    layout = LayoutConfig(context=ranks, context_comm="all_gather", timeout_s=TIMEOUT_S)
    mesh = meshes.initialize(layout, device=device, rank=rank, store=store)
    for name in arguments.models.split(","):
        small = Ranked(model_of(name, GATE_LAYERS, tiny), mesh, arguments.gate_tokens, getattr(torch, arguments.gate_dtype))
        found: dict[str, Any] = {"errors": small.errors()}
        del small
        if passed(found["errors"], LIMITS[arguments.gate_dtype]):  # the same on all ranks
            config = model_of(name, arguments.layers, tiny)
            found |= {"layers": config.n_layers}
            found |= {
                "forms": Ranked(config, mesh, arguments.tokens, torch.bfloat16).times(arguments.warm_up, arguments.repetitions)
            }
        if rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(found))
        gc.collect()
        if not tiny:
            torch.cuda.empty_cache()
    meshes.shutdown()


def passed(errors: dict[str, dict[str, float]], limit: float) -> bool:
    """Whether the forms that exchange are near, and what exchanges nothing is not: else the comparison would see no difference."""
    return all(error <= limit for form in EXCHANGING for error in errors[form].values()) and max(errors["alone"].values()) > limit


def show(report: Report, name: str, ranks: int, found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Gates, then rows."""
    errors, limit = found["errors"], LIMITS[arguments.gate_dtype]
    worst = {form: max(errors[form].items(), key=lambda one: one[1]) for form in EXCHANGING}
    detail = (
        f"{GATE_LAYERS} layers, {ranks} x {arguments.gate_tokens} tokens, {arguments.gate_dtype}: hidden and all gradients are one "
        f"rank's to {limit:g}: "
        + ", ".join(f"{form} hidden {errors[form]['hidden']:.1e}, {at} {error:.1e}" for form, (at, error) in worst.items())
        + f" (without exchange hidden {errors['alone']['hidden']:.1e}, {max(errors['alone'].values()):.1e})"
    )
    report.gate(name, passed(errors, limit), detail)
    forms, case = found["forms"], f"{name} {ranks} x {arguments.tokens}"
    losses = {form: of["loss"] for form, of in forms.items()}
    pairs = (*((form, "ring") for form in EXCHANGING), ("steps", "alone"))
    near = [abs(losses[form] - losses[like]) / losses[like] for form, like in pairs]
    said = ", ".join(f"{form} {loss:.5f}" for form, loss in losses.items())
    detail = f"losses of the timed passes, of what exchanges and of what does not, to {max(near):.1e} <= {SAME_LOSS:g}: {said}"
    # not of the largest: a NaN is larger than nothing
    report.gate(case, all(difference <= SAME_LOSS for difference in near), detail)
    report.say(f"{case}: {found['layers']} layers, ms of a pass: the slowest rank's median of {arguments.repetitions}")
    ms = {form: max(map(statistics.median, of["ms"])) for form, of in forms.items()}
    for form, of in forms.items():
        exposed, every = ms[form] - ms["alone"], [one for rank in of["ms"] for one in rank]
        by_rank = ", ".join(f"{statistics.median(rank):.2f}" for rank in of["ms"])
        report.say(
            f"  {form:<10} {ms[form]:9.2f} ({min(every):.2f} to {max(every):.2f}; by rank {by_rank}), exposed {exposed:.2f} ms, "
            f"{100 * exposed / ms[form]:.1f} % of the pass; {of['messages']} messages, {of['bytes'] / 2**20:,.1f} MiB"
        )
    computed, waited = ms["steps"] - ms["alone"], ms["ring"] - ms["steps"]
    report.say(f"  of the time that the ring exposes {computed:.2f} ms are computed and {waited:.2f} ms are messages and waiting")
    for peer, form in (
        ("the same without exchange", "alone"),
        ("all-to-all over heads", "all-to-all"),
        ("States made and sent early", "early"),
        ("States gathered", "all_gather"),
    ):
        report.row(case, "pass ms, ring", ms["ring"], peer, ms[form], gate=case, higher_is_better=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", default="mamba-1.4b,gsa-1.3b", help="names in configs/models")
    parser.add_argument("--tokens", type=int, help="of a rank (default: 16384)")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--gate-dtype", choices=LIMITS, help="what the gate computes in (default: bfloat16, as is timed)")
    parser.add_argument("--gate-tokens", type=int, help=f"of a rank in the gate (default: {GATE_TOKENS})")
    parser.add_argument("--ranks", type=int, default=2, help="with --tiny; else all GPUs")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    for key, small, large in (("tokens", 48, 16384), ("gate_tokens", 48, GATE_TOKENS), ("gate_dtype", "float32", "bfloat16")):
        setattr(arguments, key, getattr(arguments, key) or (small if tiny else large))
    ranks = arguments.ranks if tiny else torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"{ranks} GPU is visible, and an exchange takes 2; --tiny runs on a CPU")
    os.environ.setdefault("OMP_NUM_THREADS", "1" if tiny else "2")
    device = None if tiny else f"{ranks} x {torch.cuda.get_device_name()}"
    report = Report("exchange", device, keep=not tiny)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (ranks, folder, arguments), nprocs=ranks)
        finally:  # what is known is kept, should a later model fail
            for name in arguments.models.split(","):
                if (path := Path(folder, f"{name}.json")).exists():
                    show(report, name, ranks, json.loads(path.read_text()), arguments)
    report.save()


if __name__ == "__main__":
    main()
