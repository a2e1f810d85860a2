"""ZeRO by DeepSpeed, in modes that give exact gradients however backward is called.

The engine owns the optimizer and nothing else. Parameters are fp32; the executor calls autograd itself and gradients accumulate in
`.grad`; `Engine.step` sums them over data x context, clips by the global norm, updates and gathers. In DeepSpeed's terms: ZeRO-0
and ZeRO-1 with unmanaged gradient accumulation, ZeRO-2 within `coalesce_grad_reduction`. tests/parallel/test_zero.py compares all
three with plain PyTorch and guards every version bump.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baton.parallel import compat
from baton.parallel.errors import LayoutError
from baton.parallel.mesh import Mesh
from baton.parallel.param_layout import layout_of, named_layouts

_CHUNK = 1 << 24  # elements of a fragment that `update_norm` works on together


class DeepSpeedGroups:
    """The mesh under the names that DeepSpeed asks an `mpu` for.

    It must not have an attribute that begins with `get_sequence_` or is called `initialize_sequence_parallel`: DeepSpeed then
    takes it for another kind of mpu, drops the model-parallel group and computes a wrong gradient norm.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self, with_context_parallel: bool = True) -> dist.ProcessGroup:
        return self._mesh.data_group

    def get_data_parallel_world_size(self, with_context_parallel: bool = True) -> int:
        return dist.get_world_size(self._mesh.data_group)

    def get_data_parallel_rank(self, with_context_parallel: bool = True) -> int:
        return dist.get_rank(self._mesh.data_group)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.model_group

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._mesh.model_group)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.model_group)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.tensor_group

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._mesh.tensor_group)

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.tensor_group)

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self._mesh.tensor_group, 0)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._mesh.layout.pipeline


def deepspeed_config(clip_norm: float, stage: int) -> dict[str, Any]:
    """Every DeepSpeed setting that matters, stated.

    There is no bf16 block on purpose: it would cast every parameter, also those that must stay fp32.
    clip_norm: global gradient norm above which gradients are scaled down; 0 turns clipping off. stage: of ZeRO.
    """
    return {
        # DeepSpeed checks train_batch_size = micro_batch_size * accumulation * data ranks and uses it for nothing else here.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # coalesce_grad_reduction insists on True; the boundary is then set by hand
        "managed_gradient_accumulation": stage == 2,
        # The loss is divided by the labels of the whole global batch before backward; nothing else is divided anywhere.
        "gradient_allreduce_op": "sum",
        "prescale_gradients": False,
        # at stage 0 it reports no norm in fp32, so the norm and the clip are Engine's
        "gradient_clipping": clip_norm if stage else 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # at stage 2 these two send each gradient to its owner alone; without them everybody is sent everything
            "contiguous_gradients": stage == 2,
            "use_multi_rank_bucket_allreduce": False,
            "reduce_scatter": True,
            "round_robin_gradients": False,
            "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 500_000_000,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        # it waits for the GPU in every forward pass, which keeps the host from running ahead and cannot be recorded in a CUDA graph
        "timers": {"throughput": {"enabled": False}},
        "disable_allgather": False,
        "dump_state": False,
    }


def parameter_groups(
    module: nn.Module, weight_decay: float, lr_overrides: Sequence[str] = (), elsewhere: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Optimizer groups from the layouts, in the module's order: decayed and not decayed, for each learning rate.

    lr_overrides: patterns of parameter names that have a learning rate of their own, the first match counts; a group's
    "lr_override" says which
    ("": none). An empty group is left out, and so is a parameter that is not trained, or not here. elsewhere: names of other
    stages' parameters, which patterns may match as well.

    Raises:
        LayoutError: a pattern that no parameter's name matches.
    """
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for rate in ("", *lr_overrides):
        for decay in (True, False):
            name = f"{'' if decay else 'no_'}decay{rate and f' {rate}'}"
            groups[rate, decay] = {"name": name, "lr_override": rate, "params": [], "weight_decay": weight_decay if decay else 0.0}
    unused = [rate for rate in lr_overrides if not any(fnmatchcase(name, rate) for name in elsewhere)]
    for name, parameter, layout in named_layouts(module):
        matching = [rate for rate in lr_overrides if fnmatchcase(name, rate)]
        unused = [rate for rate in unused if rate not in matching]
        if parameter.requires_grad and not layout.tied_replica:
            groups[matching[0] if matching else "", layout.decay]["params"].append(parameter)
    if unused:
        raise LayoutError(f"training.optimizer.lr_overrides: no parameter's name matches {unused[0]!r}")
    return [group for group in groups.values() if group["params"]]


@dataclass(frozen=True)
class Fragment:
    """This rank's optimizer state of one parameter: elements [start, start + n) of its row-major local tensor.

    master, exp_avg, exp_avg_sq: fp32 [n], views of the optimizer's memory.
    """

    parameter: nn.Parameter
    start: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Engine:
    """DeepSpeed's engine at ZeRO stage 0, 1 or 2, driven alike: every backward of a step within `gradients`, then `step`."""

    def __init__(
        self, module: nn.Module, engine: Any, mesh: Mesh, clip_norm: float, members: Mapping[str, Sequence[nn.Parameter]]
    ) -> None:
        """members: of each of the optimizer's groups, before ZeRO makes them flat."""
        self._module, self._engine, self._mesh, self._clip_norm = module, engine, mesh, clip_norm
        self.stage: int = mesh.layout.zero
        self._members = members
        self._optimizer: torch.optim.Optimizer = engine.optimizer.optimizer if self.stage else engine.optimizer
        if self.stage == 0:
            engine.enable_backward_allreduce = False  # its step would reduce a second time, after the clip
        if self.stage == 2:
            # its hooks on the parameters hold it, and Python does not see that the parameters hold these: with them it would stay
            # for ever, and so would its process groups with their threads
            weakref.finalize(self, _remove, engine.optimizer._grad_acc_hooks).atexit = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: set "lr" there. "name" and "lr_override" are `parameter_groups`'."""
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    def gradients(self) -> AbstractContextManager[None]:
        """Where gradients add up and are finalised; at stage 2 they are reduced when it ends."""
        manager: AbstractContextManager[None] = self._engine.coalesce_grad_reduction() if self.stage == 2 else nullcontext()
        return manager

    def step(self, refuse: Callable[[float], bool] = lambda norm: False) -> float:
        """Sum gradients over data x context, clip, update, gather. Returns the norm before the clip; the gradients are gone.

        refuse: is asked, on all ranks and with the norm, whether to make no update; its answer must be the same on all.
        """
        if self.stage == 0:
            own = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self._engine.buffered_allreduce_fallback(grads=own)
            norm = self._norm()
            if refuse(norm):
                for p in self._module.parameters():
                    p.grad = None
                return norm
            self._clip(norm)
            self._engine.step()
            return norm
        if self.stage == 2:
            self._engine.set_gradient_accumulation_boundary(True)
        seen: list[float] = []
        theirs = self._engine.optimizer.scaled_global_norm

        def scaled_global_norm(*args: Any, **kwargs: Any) -> Any:
            norm = theirs(*args, **kwargs)
            # what DeepSpeed calls an overflow has the norm -1 and leaves everything as it was
            seen.append(float(norm) if float(norm) >= 0 else math.nan)
            return -1.0 if refuse(seen[0]) else norm

        from deepspeed.utils import logger

        self._engine.optimizer.scaled_global_norm = scaled_global_norm
        level = logger.level
        logger.setLevel("ERROR")  # it would say that a refused step had gradients that are not finite
        try:
            self._engine.step()
        finally:
            self._engine.optimizer.scaled_global_norm = theirs
            logger.setLevel(level)
        return seen[0] if seen else math.nan  # its own search for what is not finite comes before any norm

    def _with_gradients(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _norm(self) -> float:
        """Norm of the whole gradients; a parameter counts once, on however many ranks it is."""
        parameters = self._with_gradients()
        chosen = [p for p in parameters if layout_of(p).split is not None or self._mesh.tensor_rank == 0]
        counted = [p.grad for p in chosen if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if counted:
            squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
        dist.all_reduce(squares, group=self._mesh.model_group)
        return float(squares.sqrt())

    def _clip(self, norm: float) -> None:
        """Scale gradients down to the clip norm."""
        # the same small number as torch's clip_grad_norm_ and DeepSpeed have against a division by zero
        if self._clip_norm and norm + 1e-6 > self._clip_norm:
            torch._foreach_mul_([p.grad for p in self._with_gradients() if p.grad is not None], self._clip_norm / (norm + 1e-6))

    @torch.no_grad()
    def update_norm(self) -> float:
        """Norm of the last update of all parameters together, from AdamW's moments and master weights. Every rank calls it."""
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        owner = self.stage > 0 or dist.get_rank(self._mesh.data_group) == 0
        steps = self.updates
        for fragment, group in self._fragments_of_groups() if owner and steps else ():
            if layout_of(fragment.parameter).split is None and self._mesh.tensor_rank:
                continue
            lr, decay, (b1, b2), eps = group["lr"], group["weight_decay"], group["betas"], group["eps"]
            pieces = (x.split(_CHUNK) for x in (fragment.master, fragment.exp_avg, fragment.exp_avg_sq))
            for master, m, v in zip(*pieces, strict=True):
                adam = m / (1 - b1**steps) / ((v / (1 - b2**steps)).sqrt() + eps)
                # new = old * (1 - lr * decay) - lr * adam
                old = (master + lr * adam) / (1 - lr * decay)
                squares += torch.linalg.vector_norm(master - old, dtype=torch.float64).square()
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def _fragments_of_groups(self) -> Iterator[tuple[Fragment, dict[str, Any]]]:
        """What this rank's optimizer holds, each with the settings of its group."""
        own = {group["name"]: group for group in self.param_groups}
        names = {p: name for name, parameters in self._members.items() for p in parameters}
        for fragment in self.fragments():
            yield fragment, own[names[fragment.parameter]]

    def create_state(self) -> None:
        """Create AdamW's moments now instead of in the first step, so that they can be loaded into, or saved at step 0."""
        for group in self._optimizer.param_groups:
            for x in group["params"]:
                if not self._optimizer.state.get(x):
                    self._optimizer.state[x] = {
                        "step": torch.zeros((), dtype=torch.float32, device=x.device if group.get("fused") else "cpu"),
                        "exp_avg": torch.zeros_like(x),
                        "exp_avg_sq": torch.zeros_like(x),
                    }

    @property
    def updates(self) -> int:
        """Number of updates that AdamW has made (for its bias correction)."""
        return int(next(iter(self.update_counts().values())))

    @updates.setter
    def updates(self, count: int) -> None:
        for counted in self.update_counts().values():
            counted.fill_(float(count))

    def update_counts(self) -> dict[str, Tensor]:
        """The same as AdamW keeps them, by what it keeps them for: fp32 scalars, its own memory."""
        return {
            f"group {group['name']}" + (f", tensor {n}" if n else ""): self._optimizer.state[x]["step"]
            for group in self._optimizer.param_groups
            for n, x in enumerate(group["params"])
        }

    def fragments(self) -> Iterator[Fragment]:
        """What this rank's optimizer holds, parameter by parameter, after `create_state`."""
        state = self._optimizer.state
        if self.stage == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    yield Fragment(p, 0, *(x.detach().view(-1) for x in (p, state[p]["exp_avg"], state[p]["exp_avg_sq"])))
            return
        # the moments by the group's flat tensor: DeepSpeed's own links to optimizer fragments cover group 0 only
        flats = self._engine.optimizer.single_partition_of_fp32_groups
        for p in self._module.parameters():
            fragment = getattr(p, "_hp_mapping", None)
            if fragment is None:
                continue
            here, there, flat = fragment.lp_fragment_address, fragment.hp_fragment_address, flats[fragment.param_group_index]
            own = slice(there.start, there.start + there.numel)
            yield Fragment(p, here.start, flat.detach()[own], state[flat]["exp_avg"][own], state[flat]["exp_avg_sq"][own])

    def masters_changed(self) -> None:
        """Copy the master weights into the module after they were written to."""
        if self.stage:
            self._engine.optimizer.update_lp_params()
        broadcast_tied(self._module, self._mesh)


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


def build_engine(module: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, clip_norm: float) -> Engine:
    """An engine at the layout's ZeRO stage over the optimizer. The module's parameters must be fp32 and already initialised."""
    deepspeed = compat.import_deepspeed(mesh.device.type)
    config = deepspeed_config(clip_norm, mesh.layout.zero)
    members = {group["name"]: list(group["params"]) for group in optimizer.param_groups}
    with compat.lazy_compile():  # it imports optimizers whose functions are decorated with torch.compile
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, mpu=DeepSpeedGroups(mesh), dist_init_required=False
        )
    for parameter in module.parameters():
        # DeepSpeed keeps a view of each parameter, and the view, made with a graph, the parameter's accumulator: for good that of
        # the stream on which the engine was made, whatever stream a backward pass is on
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:
            fragment.lp_fragment = fragment.lp_fragment.detach()
    return Engine(module, engine, mesh, clip_norm, members)


def finalize_model_grads(module: nn.Module, mesh: Mesh) -> None:
    """Add up gradients that are partial sums over the tensor group, one coalesced all-reduce per group, before the engine's step;
    and add gradients of tied replicas to their owners'.

    Raises RuntimeError for a trainable parameter without a gradient: ZeRO-1 skips it silently, and ranks that skip different
    parameters exchange buckets that do not match.
    """
    partial: dict[str, list[torch.Tensor]] = {"tensor": []}
    for name, parameter, layout in named_layouts(module):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient after backward: every trainable parameter must take part in the loss")
        for group in layout.partial_over:
            partial[group].append(parameter.grad)
    _all_reduce_coalesced(partial["tensor"], mesh.tensor_group)
    for parameter in _shared_embedding(module, mesh):
        assert parameter.grad is not None
        dist.reduce(parameter.grad, dst=dist.get_global_rank(_group(mesh), 0), group=_group(mesh))
        if layout_of(parameter).tied_replica:
            parameter.grad = None


@torch.no_grad()
def broadcast_tied(module: nn.Module, mesh: Mesh) -> None:
    """Copy the values of tied parameters from the owner to the stage with the replica, after they changed."""
    for parameter in _shared_embedding(module, mesh):
        dist.broadcast(parameter, src=dist.get_global_rank(_group(mesh), 0), group=_group(mesh))


def _shared_embedding(module: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """The tied embedding on the first and on the last of several stages; nothing on other stages."""
    if mesh.embedding_group is None:
        return []
    return [p for _, p, layout in named_layouts(module) if layout.tied_replica or layout.tied_owner]


def _group(mesh: Mesh) -> dist.ProcessGroup:
    assert mesh.embedding_group is not None
    return mesh.embedding_group


def _all_reduce_coalesced(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    tensors = list(tensors)
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))
