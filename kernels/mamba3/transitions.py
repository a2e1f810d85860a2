"""What a span of tokens does to Mamba-3's State that enters it, and to the gradient of the State that leaves it.

With the entering State (h, k, x) a span of decay e^G, angle A and first share before = (1 - lam) dt leaves

    h' = e^G R(-A) (h + before k x^T) + add.h        k' = add.k        x' = add.x

which is linear in h and in k x^T. So is its mirror, with the entering k and x:

    dS = e^G R(A) dh'        dh = dS + add.h        dk = before dS x + add.k        dx = before dS^T k + add.x

Both compose. A span in which a document starts has the decay 0.
"""

from dataclasses import dataclass

from torch import Tensor

from baton.kernels.mamba3.rotation import turned
from baton.kernels.protocol import State, StateTransition


@dataclass(frozen=True)
class Transition(StateTransition):
    """span: decay and before [batch, heads], cos and sin [batch, heads, pairs] of its angle. add: the State reached from zero."""

    span: State
    add: State

    def apply(self, state: State) -> State:
        written = state["k"][..., None] * state["x"][:, :, None]
        h = _decayed(state["h"] + self.span["before"][..., None, None] * written, self.span, -1) + self.add["h"]
        return {"h": h, "k": self.add["k"], "x": self.add["x"]}

    def compose(self, later: StateTransition) -> "Transition":
        assert isinstance(later, Transition)
        return Transition(_joined(self.span, later.span) | {"before": self.span["before"]}, later.apply(self.add))


@dataclass(frozen=True)
class GradientTransition(StateTransition):
    """span: as of `Transition`. entered: k and x of the entering State. add: its gradient from the span's outputs."""

    span: State
    entered: State
    add: State

    def apply(self, state: State) -> State:
        dS = _decayed(state["h"], self.span, 1)
        written = self.span["before"][..., None, None] * dS
        return {
            "h": dS + self.add["h"],
            "k": (written * self.entered["x"][:, :, None]).sum(3) + self.add["k"],
            "x": (written * self.entered["k"][..., None]).sum(2) + self.add["x"],
        }

    def compose(self, later: StateTransition) -> "GradientTransition":
        assert isinstance(later, GradientTransition)
        span = _joined(self.span, later.span) | {"before": later.span["before"]}
        return GradientTransition(span, later.entered, later.apply(self.add))


def _decayed(h_BHNP: Tensor, span: State, direction: int) -> Tensor:
    cos, sin = span["cos"][:, :, None], direction * span["sin"][:, :, None]
    return span["decay"][..., None, None] * turned(h_BHNP.transpose(2, 3), cos, sin).transpose(2, 3)


def _joined(a: State, b: State) -> State:
    """Decay and angle of both spans."""
    cos, sin = a["cos"] * b["cos"] - a["sin"] * b["sin"], a["sin"] * b["cos"] + a["cos"] * b["sin"]
    return {"decay": a["decay"] * b["decay"], "cos": cos, "sin": sin}
