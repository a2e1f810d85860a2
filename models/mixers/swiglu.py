"""The gated MLP: down(silu(gate(x)) * up(x)). It looks at one token at a time, so it carries nothing.

Source: Shazeer, "GLU variants improve Transformer", equation 6. Hidden features are split over the tensor group.
"""

from torch import Tensor

from baton.kernels.compile.aot import on_gpu
from baton.kernels.gate import gated
from baton.kernels.protocol import State, StateSpec
from baton.models.mixer import Mixer, MixerContext
from baton.models.selective_recompute import recompute_in_backward
from baton.models.settings.swiglu import SwiGLUConfig


class SwiGLU(Mixer, settings=SwiGLUConfig):
    """x [B, T, M] -> y [B, T, M]; the State is empty."""

    def __init__(self, config: SwiGLUConfig, context: MixerContext) -> None:
        super().__init__()
        hidden = config.width(context.d_model)
        self.in_proj = context.column(2 * hidden, fused_splits=(("gate", hidden), ("up", hidden)))
        self.out_proj = context.output(hidden)
        self._selective = context.selective_recompute
        self._widths = (hidden // context.tensor_size,) * 2

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return ()

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        gate, up = self.in_proj(x_BTM, self._widths)
        product = gated(up, gate)
        # on a CPU the gate keeps copies of its own, not what would make it again
        with recompute_in_backward(self._selective and on_gpu(product)) as discard:
            discard(product, lambda: gated(up, gate))
            return self.out_proj(product), {}
