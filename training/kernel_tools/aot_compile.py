"""Compiles a run's kernels before it starts, for a GPU that need not be present: on a login node, once for all nodes.

A rank's model makes a step on the meta device for every shape of the run's steps, and the kernels of the check before the
first step are launched too. Nothing is computed and no memory allocated, so any size compiles on any machine.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch

from baton.data_pipeline.packing import Batch
from baton.kernels import adamw
from baton.kernels.common.kernel_check import launch
from baton.kernels.compile.aot import META, Compiled, Target, compiling
from baton.kernels.protocol import Recurrence
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel import mesh as meshes
from baton.parallel.cast_weights import drop_cast_weights
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink
from baton.parallel.linear import fused_grad_accumulation
from baton.parallel.pipeline import Operation, StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import DTYPES, build_model
from baton.training.config import Recompute, TrainingConfig
from baton.training.step.microbatch_runner import MicrobatchRunner

__all__ = ["Target", "compile_run_kernels"]


def compile_run_kernels(
    model: ModelConfig,
    training: TrainingConfig,
    layout: LayoutConfig,
    wanted: Target,
    processes: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Compiled:
    """Compile what a rank of the run launches in its steps, with one of each kind of layer.

    processes: that compile; default: the usable cores. say: receives lines about progress.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # a first layer, to whose stream nothing is to be added yet, and one behind another
    layers = model.model_copy(update={"n_layers": min(model.n_layers, max(2, len(model.period)))})
    # stages have the same kinds of layers and data ranks the same everything; a link to itself takes the steps of a sequence rank
    own = LayoutConfig(tensor=layout.tensor, sequence_parallel=layout.sequence_parallel)
    with compiling(wanted, processes, say) as compiled:
        mesh = meshes.initialize(own, device=META, rank=0, store=FakeStore())
        if layout.context > 1:
            # what is gathered is made as what is sent early
            early = layout.uses_transitions(training.gradient_segments)
            mesh = replace(mesh, link=ContextLink(0, [0], META, exchange="early" if early else "ring"))
        try:
            recorded: set[Recurrence] = set()
            # auto is chosen when the run starts; a pass that recomputes states launches all that one does which keeps them
            forms = [form for form in get_args(Recompute) if form != "none"]
            for recompute in forms if training.recompute == "auto" else (training.recompute,):
                form = training.model_copy(update={"recompute": recompute})
                rank_model = build_model(layers, form, META, mesh)
                for at in {(at.micro_batch_size, at.sequence_length): at for _, at in form.phases}.values():
                    lanes = LaneStates(rank_model, at, mesh) if at.carries_lane_states else None
                    _step(rank_model, at, layout.context, lanes, recorded)
            compute_dtype = DTYPES[training.compute_dtype_on(META.type)]
            for recurrence in sorted(recorded, key=str):
                launch(recurrence, META, compute_dtype)
            adamw.launch_forms(META, DTYPES[training.optimizer.moments_dtype], compute_dtype)
        finally:
            meshes.shutdown()
    return compiled


def _step(
    model: LanguageModel, training: TrainingConfig, sequence: int, lanes: LaneStates | None, recorded: set[Recurrence]
) -> None:
    """Two micro-batches, the second adding to the gradients of the first, in segments if there are any; and an evaluation.

    recorded: receives the recurrences.
    """
    span = training.segment // sequence
    # a first, a middle and a last one of those that a gradient goes through together, and what comes behind them
    gradient = min(training.gradient_segments, 3)
    schedule = StepSchedule(gradient if training.gradient_segments == training.segments else 2 * gradient, gradient)
    order = schedule.operations(0, 1, 2)
    if sequence > 1 and training.segments == 1:
        schedule = StepSchedule(2, 2)
        order = []
        for n in range(2):
            order += [
                Operation("forward", n, 0),
                Operation("forward", n, 1),
                Operation("backward", n, 1),
                Operation("backward", n, 0),
            ]
    shape = training.micro_batch_size, span * schedule.segments
    ids, pos = (torch.empty(shape, dtype=dtype, device=META) for dtype in (torch.int64, torch.int32))
    batch = Batch(ids, ids, pos, tuple(range(training.micro_batch_size)))
    if lanes is not None:
        lanes.begin_step()
    forward_context = replace(model.forward_context, recorded=recorded)
    runner = MicrobatchRunner(model, [batch, batch], 1.0, schedule, lanes, forward_context)
    with fused_grad_accumulation():
        for operation in order:
            runner.run_operation(operation)
        runner.finish()
    with torch.no_grad():
        y, _ = model(ids[:, :span], pos[:, :span], None, replace(forward_context, need_final_state=False))
        model.loss(y, ids[:, :span])
    drop_cast_weights(model)
    model.zero_grad()
