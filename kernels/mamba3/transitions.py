"""What a span of tokens does to Mamba-3's State that enters it, and to the gradient of the State that leaves it.

With the entering State (h, k, x) a span of decay e^G, angle A and first share before = (1 - lam) dt leaves

    h' = e^G R(-A) (h + before k x^T) + add.h        k' = add.k        x' = add.x

which is linear in h and in k x^T, a sum of products where a head has several k and x. So is its mirror, with the entering k and x:

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
        before = self.span["before"][..., None, None] * written(state["k"], state["x"])
        h = _decayed(state["h"] + before, self.span, -1) + self.add["h"]
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
        dwritten = self.span["before"][..., None, None] * dS
        if self.entered["k"].ndim == 4:
            dwritten = dwritten.unsqueeze(2)  # of all k and x of a head alike
        return {
            "h": dS + self.add["h"],
            "k": (dwritten * self.entered["x"].unsqueeze(-2)).sum(-1) + self.add["k"],
            "x": (dwritten * self.entered["k"].unsqueeze(-1)).sum(-2) + self.add["x"],
        }

    def compose(self, later: StateTransition) -> "GradientTransition":
        assert isinstance(later, GradientTransition)
        span = _joined(self.span, later.span) | {"before": later.span["before"]}
        return GradientTransition(span, later.entered, later.apply(self.add))


def written(k: Tensor, x: Tensor) -> Tensor:
    """k x^T [batch, heads, d_state, head_dim] of k [batch, heads, d_state] and x [batch, heads, head_dim], or the sum of those of
    several, k [batch, heads, rank, d_state] and x [batch, heads, rank, head_dim]. No matrix product, which autocast would round."""
    if k.ndim == 3:
        return k[..., None] * x[:, :, None]
    return sum((written(k[:, :, j], x[:, :, j]) for j in range(1, k.shape[2])), start=written(k[:, :, 0], x[:, :, 0]))


def _decayed(h_BHNP: Tensor, span: State, direction: int) -> Tensor:
    cos, sin = span["cos"][:, :, None], direction * span["sin"][:, :, None]
    return span["decay"][..., None, None] * turned(h_BHNP.transpose(2, 3), cos, sin).transpose(2, 3)


def _joined(a: State, b: State) -> State:
    """Decay and angle of both spans."""
    cos, sin = a["cos"] * b["cos"] - a["sin"] * b["sin"], a["sin"] * b["cos"] + a["cos"] * b["sin"]
    return {"decay": a["decay"] * b["decay"], "cos": cos, "sin": sin}
