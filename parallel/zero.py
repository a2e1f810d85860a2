"""ZeRO by DeepSpeed, in modes that give exact gradients however backward is called.

The engine owns the optimizer and nothing else. Parameters are fp32; the executor calls autograd itself and gradients accumulate in
`.grad`; `Engine.sum_gradients` sums them over data x context, `Engine.update` clips by the global norm, updates and gathers. In
DeepSpeed's terms: ZeRO-0
and ZeRO-1 with unmanaged gradient accumulation, ZeRO-2 within `coalesce_grad_reduction`. tests/parallel/test_zero.py compares all
three with plain PyTorch and guards every version bump.

With ZeRO-1 and 2 DeepSpeed partitions the parameters, sums gradients to their owners and gathers parameters; norm, clip and update
are made here, on what it leaves: its own step copies the gradients three times and the parameters once. Parameters are fp32, so a
rank's part of them serves as the master weights itself (`_share_masters`). With one data rank nothing is to be summed, and
the gradients are read where they lie.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baton.kernels.adamw import AdamWStep, prepare_adamw
from baton.parallel import compat
from baton.parallel.cast_weights import caches_of, copies_of, drop_cast_weights
from baton.parallel.deepspeed_settings import DeepSpeedGroups, deepspeed_config
from baton.parallel.mesh import Mesh
from baton.parallel.param_layout import layout_of
from baton.parallel.replicated_parameters import broadcast_tied

_CHUNK = 1 << 24  # elements of a fragment that `update_norm` works on together


@dataclass(frozen=True)
class Fragment:
    """This rank's optimizer state of one parameter: elements [start, start + n) of its row-major local tensor.

    master: fp32 [n]; exp_avg, exp_avg_sq: fp32 or bf16 [n]; views of the optimizer's memory.
    """

    parameter: nn.Parameter
    start: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Engine:
    """DeepSpeed's engine at ZeRO stage 0, 1 or 2, driven alike: every backward of a step within `gradients`, then `sum_gradients`,
    then `update` or `drop_gradients`."""

    def __init__(
        self, module: nn.Module, engine: Any, mesh: Mesh, clip_norm: float, members: Mapping[str, Sequence[nn.Parameter]],
        moments_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """members: of each of the optimizer's groups, before ZeRO makes them flat."""
        self._module, self._engine, self._mesh, self._clip_norm = module, engine, mesh, clip_norm
        self._parameters = list(module.parameters())  # a walk through all modules takes as long as an update of few parameters
        self.stage: int = mesh.layout.zero
        self._members = members
        self._ranks = dist.get_world_size(mesh.data_group)
        self._zero = engine.optimizer  # DeepSpeed's, at stage 0 the optimizer itself
        self._optimizer: torch.optim.Optimizer = self._zero.optimizer if self.stage else engine.optimizer
        self._moments_dtype = moments_dtype
        in_one_pass = mesh.device.type == "cuda" or moments_dtype != torch.float32  # PyTorch's has moments of the masters' type
        self._fused = bool(self.stage) and isinstance(self._optimizer, torch.optim.AdamW) and in_one_pass
        self._updates = 0  # that were made, as the optimizer counts them on the device
        # the update of the gradients that are summed; returns the cast weights that it wrote
        self._prepared: Callable[[float], Set[Tensor]] | None = None
        self._cast_weights = caches_of(module)
        if self.stage == 2:
            # its hooks on the parameters hold it, and Python does not see that the parameters hold these: with them it would stay
            # for ever, and so would its process groups with their threads
            weakref.finalize(self, _remove, engine.optimizer._grad_acc_hooks).atexit = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: set "lr" there. "name" and "lr_override" are those of `parameter_groups.parameter_groups`."""
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    def gradients(self) -> AbstractContextManager[None]:
        """Where gradients add up and are finalised; at stage 2 they are reduced when it ends."""
        manager: AbstractContextManager[None] = self._engine.coalesce_grad_reduction() if self.stage == 2 else nullcontext()
        return manager

    def local_norms(self) -> dict[nn.Parameter, Tensor]:
        """Norms of this rank's gradients, fp32 [], before they are summed over data x context."""
        own = {p: p.grad for p in self._parameters if p.grad is not None}
        return dict(zip(own, torch._foreach_norm(list(own.values())), strict=True)) if own else {}

    def sum_gradients(self, norms: Mapping[nn.Parameter, Tensor] | None = None) -> Tensor:
        """Sum the gradients over data x context; returns the global norm, float64 [], without waiting for it.

        The update is prepared as far as it does not depend on values, which takes the host longer than the rest of it.

        norms: `local_norms`, if they are known and the gradients have not changed since.
        """
        groups = self._summed_gradients()
        if norms is None or self._ranks > 1:
            found = [(p, grad) for gradients in groups for p, grad, _ in gradients]
            norms = dict(zip((p for p, _ in found), torch._foreach_norm([grad for _, grad in found]), strict=True)) if found else {}
        self._prepared = self._prepare_update(groups)
        return self._global_norm(norms)

    def update(self, norm: float) -> None:
        """Clip, update this rank's part of the parameters and gather the others'. Gradients are gone; cast weights are new or gone.

        norm: what `sum_gradients` returned.
        """
        assert self._prepared is not None
        # the same small number as torch's clip_grad_norm_ and DeepSpeed have against a division by zero
        clipped = self._clip_norm > 0 and norm + 1e-6 > self._clip_norm
        written = self._prepared(self._clip_norm / (norm + 1e-6) if clipped else 1.0)
        drop_cast_weights(cache for cache in self._cast_weights if cache._cast_weight_cache not in written)
        self._updates += 1
        self.drop_gradients()

    def _summed_gradients(self) -> list[list[tuple[nn.Parameter, Tensor, int]]]:
        """By group of the optimizer: what this rank updates, with its gradient summed over data x context and where its elements
        lie in the group's flat partition (stage 0: 0)."""
        if self.stage == 0:
            groups = [[(p, p.grad, 0) for p in group["params"] if p.grad is not None] for group in self.param_groups]
            if self._ranks > 1:
                self._engine.buffered_allreduce_fallback(grads=[grad for gradients in groups for _, grad, _ in gradients])
            return groups
        zero = self._zero
        if self._ranks == 1 and self.stage == 1:
            return [[(p, p.grad, _start_in_partition(p)) for p in ps if p.grad is not None] for ps in zero.params_in_partition]
        if self.stage == 1:
            zero.set_gradient_accumulation_boundary(True)
            zero.reduce_gradients()
        # behind a partition's last gradient there may be one of zeros for its padding, which nothing needs
        return [
            [(p, grad, _start_in_partition(p)) for p, grad in zip(params, zero.averaged_gradients[n], strict=False)]
            for n, params in enumerate(zero.params_in_partition)
        ]

    def _prepare_update(self, groups: Sequence[Sequence[tuple[nn.Parameter, Tensor, int]]]) -> Callable[[float], Set[Tensor]]:
        """A function that makes the update, given a factor of the gradients, and returns the cast weights that it wrote."""
        if self.stage == 0:
            return partial(self._update_whole, [grad for gradients in groups for _, grad, _ in gradients])
        flats = self._zero.single_partition_of_fp32_groups
        if not self._fused:
            return partial(self._update_flat, list(zip(flats, groups, strict=True)))
        # over several ranks none has all new values of a parameter, and of a tied replica they come from its owner
        copies = copies_of(self._cast_weights) if self._ranks == 1 else {}
        copies = {p: copy for p, copy in copies.items() if not layout_of(p).tied_replica}
        updates = []
        for settings, flat, gradients in zip(self._optimizer.param_groups, flats, groups, strict=True):
            state, grads = self._optimizer.state[flat], [grad.contiguous() for _, grad, _ in gradients]
            starts, into = [at for _, _, at in gradients], [copies.get(p) for p, _, _ in gradients]
            updates.append((settings, prepare_adamw(flat.data, state["exp_avg"], state["exp_avg_sq"], grads, starts, into)))
        written = {copies[p] for gradients in groups for p, _, _ in gradients if p in copies}
        return partial(self._update_in_one_pass, updates, written)

    def _update_whole(self, gradients: list[Tensor], scale: float) -> Set[Tensor]:
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        self._optimizer.step()
        return set()

    def _update_flat(
        self, groups: Sequence[tuple[Tensor, Sequence[tuple[nn.Parameter, Tensor, int]]]], scale: float
    ) -> Set[Tensor]:
        for flat, gradients in groups:
            flat.grad = torch.zeros_like(flat)
            for _, grad, at in gradients:
                flat.grad[at : at + grad.numel()] = grad.reshape(-1)
            flat.grad *= scale
        self._optimizer.step()
        for flat, _ in groups:
            flat.grad = None
        self._gather()
        return set()

    def _update_in_one_pass(
        self, updates: Sequence[tuple[dict[str, Any], Callable[[AdamWStep], None]]], copies: Set[Tensor], scale: float
    ) -> Set[Tensor]:
        for settings, update in updates:
            lr, betas, eps, decay = (settings[name] for name in ("lr", "betas", "eps", "weight_decay"))
            update(AdamWStep(lr, betas, eps, decay, self._updates + 1, scale))
        torch._foreach_add_(list(self.update_counts().values()), 1.0)
        self._gather()
        return copies

    def _gather(self) -> None:
        """Every rank's part of the parameters to all ranks."""
        zero = self._zero
        if self._ranks > 1:
            from deepspeed.runtime.utils import all_gather_dp_groups

            all_gather_dp_groups(
                groups_flat=zero.bit16_groups_flat,
                partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
                dp_process_group=zero.real_dp_process_group,
                start_alignment_factor=zero.nccl_start_alignment_factor,
                allgather_bucket_size=zero.allgather_bucket_size,
            )

    def drop_gradients(self) -> None:
        """Make no update."""
        self._prepared = None
        for p in self._parameters:
            p.grad = None
        if self.stage:
            from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

            # as DeepSpeed's own step leaves it: the next gradients are no longer added to these
            self._zero.micro_step_id = INITIAL_MICRO_STEP_ID
            self._zero.zero_grad(set_to_none=True)
            for n in self._zero.averaged_gradients:
                self._zero.averaged_gradients[n] = self._zero.all_grad_tensors[n] = None

    def _global_norm(self, norms: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Norm of the whole gradients, of those of which this rank has parts; a parameter counts once, on however many ranks it
        is. float64 []."""
        counted = [norm for p, norm in norms.items() if layout_of(p).split is not None or self._mesh.tensor_rank == 0]
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if counted:
            squares += torch.stack(counted).double().square().sum()
        if self.stage and self._ranks > 1:
            dist.all_reduce(squares, group=self._mesh.data_group)
        if dist.get_world_size(self._mesh.model_group) > 1:
            dist.all_reduce(squares, group=self._mesh.model_group)
        return squares.sqrt()

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
                m, v = m.float(), v.float()
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
                        "exp_avg": torch.zeros_like(x, dtype=self._moments_dtype),
                        "exp_avg_sq": torch.zeros_like(x, dtype=self._moments_dtype),
                    }

    @property
    def updates(self) -> int:
        """Number of updates that AdamW has made (for its bias correction)."""
        return int(next(iter(self.update_counts().values())))

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
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
        flats = self._zero.single_partition_of_fp32_groups
        for p in self._parameters:
            fragment = getattr(p, "_hp_mapping", None)
            if fragment is None:
                continue
            here, there, flat = fragment.lp_fragment_address, fragment.hp_fragment_address, flats[fragment.param_group_index]
            own = slice(there.start, there.start + there.numel)
            yield Fragment(p, here.start, flat.detach()[own], state[flat]["exp_avg"][own], state[flat]["exp_avg_sq"][own])

    def masters_changed(self) -> None:
        """Hand the master weights to all ranks after they were written to."""
        if self.stage:
            self._gather()
        broadcast_tied(self._module, self._mesh)


def _start_in_partition(parameter: nn.Parameter) -> int:
    """Where this rank's elements of a parameter lie in the flat partition of its group."""
    start: int = parameter._hp_mapping.hp_fragment_address.start  # type: ignore[attr-defined]
    return start


def _share_masters(zero: Any) -> None:
    """Makes this rank's partition of the parameters the master weights: 4 bytes a number less memory, and none to copy."""
    for n, flat in enumerate(zero.single_partition_of_fp32_groups):
        own = zero.parallel_partitioned_bit16_groups[n][dist.get_rank(zero.real_dp_process_group[n])]
        assert own.dtype == flat.dtype
        assert own.shape == flat.shape
        flat.data = own.detach()


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


def build_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    clip_norm: float,
    moments_dtype: torch.dtype = torch.float32,
) -> Engine:
    """An engine at the layout's ZeRO stage over the optimizer. The module's parameters must be fp32 and already initialised.

    moments_dtype: of AdamW's moments, torch.float32, or torch.bfloat16 with ZeRO-1 and 2.
    """
    assert mesh.layout.zero or moments_dtype == torch.float32
    deepspeed = compat.import_deepspeed(mesh.device.type)
    config = deepspeed_config(mesh.layout.zero)
    members = {group["name"]: list(group["params"]) for group in optimizer.param_groups}
    with compat.lazy_compile():  # it imports optimizers whose functions are decorated with torch.compile
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, mpu=DeepSpeedGroups(mesh), dist_init_required=False
        )
    if mesh.layout.zero:
        _share_masters(engine.optimizer)
    for parameter in module.parameters():
        # DeepSpeed keeps a view of each parameter, and the view, made with a graph, the parameter's accumulator: for good that of
        # the stream on which the engine was made, whatever stream a backward pass is on
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:
            # both are fp32, and one memory now
            fragment.lp_fragment = fragment.hp_fragment = fragment.lp_fragment.detach()
    return Engine(module, engine, mesh, clip_norm, members, moments_dtype)
