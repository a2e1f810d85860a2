"""B'MOJO's attention as a recurrence, in the paper's form, the sliding one, and each kind of memory alone."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.eidetic_attention.chunked import Options
from baton.kernels.eidetic_attention.op import eidetic_attention, empty, leaves
from baton.kernels.eidetic_attention.reference import eidetic_attention_reference
from baton.kernels.examples import randn
from baton.kernels.in_chunks import compute_dtype
from baton.kernels.protocol import Inputs, Leaf, Recurrence, State


@dataclass(frozen=True)
class EideticAttention(Recurrence):
    """Inputs q, k, v, fading_k, fading_v, score along time. See `op.eidetic_attention`."""

    window: int
    n_fading: int
    n_eidetic: int
    sliding: bool = False
    input_names = ("q", "k", "v", "fading_k", "fading_v", "score")
    along = 6
    needs_pos = True

    @property
    def name(self) -> str:  # type: ignore[override]
        sliding = "-sliding" if self.sliding else ""
        return f"eidetic_attention-w{self.window}-f{self.n_fading}-e{self.n_eidetic}{sliding}"

    def _options(self, inputs: Inputs) -> Options:
        return Options(self.window, self.n_fading, self.n_eidetic, self.sliding, inputs[0].shape[-1] ** -0.5)

    def leaves(self, inputs: Inputs) -> tuple[Leaf, ...]:
        return leaves(self._options(inputs), inputs[1], compute_dtype(*inputs))

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        sizes = {"window": self.window, "n_fading": self.n_fading, "n_eidetic": self.n_eidetic, "sliding": self.sliding}
        return eidetic_attention(*inputs, **sizes, pos=pos, state=state)  # type: ignore[arg-type]

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        assert pos is not None
        if state is None:
            state = empty(self.leaves(inputs), inputs[0].shape[0], inputs[0].device)
        sizes = {"window": self.window, "n_fading": self.n_fading, "n_eidetic": self.n_eidetic, "sliding": self.sliding}
        return eidetic_attention_reference(*inputs, **sizes, pos=pos, state=state, scale=inputs[0].shape[-1] ** -0.5)  # type: ignore[arg-type]

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """The State is one that some tokens of a document before have left; scores have ties."""
        heads, groups, dim = (6, 3, 17) if wide else (2, 1, 3)

        def inputs(tokens: int) -> Inputs:
            normal = partial(randn, generator, dtype=dtype)
            keyed = [normal(batch, tokens, groups, dim) for _ in range(4)]
            score = (3 * torch.rand(batch, tokens, generator=generator, dtype=dtype)).round(decimals=1)
            return (2 * normal(batch, tokens, heads, dim), *keyed, score)

        pos = torch.arange(2 * self.window + 3).repeat(batch, 1) - torch.arange(batch)[:, None]
        with torch.no_grad():
            _, state = self.run(inputs(pos.shape[1]), pos.clamp(min=0), None)
        return inputs(length), state


RECURRENCES = (
    EideticAttention(4, 2, 3),
    EideticAttention(3, 3, 7),
    EideticAttention(5, 0, 2),
    EideticAttention(4, 1, 0),
    EideticAttention(3, 0, 0, sliding=True),
    EideticAttention(4, 0, 3, sliding=True),
)
