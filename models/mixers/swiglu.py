"""The gated MLP (SwiGLU): down(silu(gate(x)) * up(x)). It has no recurrence.

Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6. Hidden features are split over the tensor group.

Shapes: B batch, T time, M d_model.
"""

from torch import Tensor

from baton.kernels.common.selective_recompute import recompute_in_backward
from baton.kernels.compile.aot import on_gpu
from baton.kernels.gate import gated
from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.settings.swiglu import SwiGLUConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class SwiGLU(Mixer, settings=SwiGLUConfig):
    """x [B, T, M] -> y [B, T, M]; the State is empty."""

    config: SwiGLUConfig
    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        gate, up = self.in_proj(x_BTM, self.in_proj.local_splits)
        product = gated(up, gate)
        # on a CPU the gate saves copies of its inputs, so discarding its output would save no memory
        with recompute_in_backward(self.context.selective_recompute and on_gpu(product)) as discard:
            discard(product, lambda: gated(up, gate))
            return self.out_proj(product), {}
