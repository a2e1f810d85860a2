"""Settings of B'MOJO."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from baton.models.settings.attention import HeadsConfig
from baton.models.settings.cost_model import (
    EIDETIC_BLOCK,
    Carrier,
    Footprint,
    Kept,
    StateLeaf,
    column,
    column_gradient,
    row,
    row_sum,
    split,
)
from baton.models.settings.mamba import MambaConfig


class BMojoConfig(HeadsConfig):
    """Attention over a window, fading and eidetic tokens beside a state space (Zancato et al.). B'MOJO-F: eidetic=0.

    The paper gives the window and leaves the other sizes open. A memory is first used `window` tokens after a document's start:
    where no document is longer than the window, the layer is attention without positions, and the state space gets a gradient of 0.
    """

    kind: Literal["bmojo"] = "bmojo"
    window: int = Field(512, ge=1, description="tokens of the window, and between two publications of the memory; the paper's 512")
    fading: Literal["chunk", "sliding"] = Field(
        "chunk", description="chunk: the last outputs of the state space before the window's multiple, as in the paper; sliding: "
        "those one to two windows back, of every token"
    )  # fmt: skip
    fading_tokens: int = Field(
        16, ge=0, description="with fading=chunk: outputs of the state space in a memory; more of them give it more of a gradient. "
        "Algorithm 1 has one, y_{t-w} for each token t; in chunks, as the paper trains, a memory stays for a window, so that 1 is "
        "the algorithm's token for a chunk's last token, and a newer one for those before it"
    )  # fmt: skip
    eidetic: int = Field(64, ge=0, description="tokens with the largest innovation that are kept verbatim; 0: B'MOJO-F")
    d_conv: int | None = Field(
        4, ge=2, description="tokens that the causal convolutions of the tokens' keys and values see; not in the paper. Without "
        "positions they alone tell a layer which token came before, as recall needs. null: none, which is Algorithm 1 as printed; "
        "a stack of such layers alone learns recall slowly and in part (docs/measured.md, recall)"
    )  # fmt: skip
    predictor: int = Field(4, ge=1, description="outputs that foretell the next one; the paper says few and gives no number")
    predictor_weights: Literal["halved", "uniform"] = Field(
        "halved", description="weights of these outputs, of sum 1 and not learned: halved: 2^-1, 2^-2, ..., the nearest first, "
        "normalised; uniform: all the same. The paper says a fixed weighted average"
    )  # fmt: skip
    innovation_norm: Literal["l2", "l1", "max"] = Field(
        "l2", description="norm, over the channels, of what was not foretold: l2: the root of the mean square; l1: the mean "
        "absolute value; max: the largest one. The paper gives none"
    )  # fmt: skip
    ssm: MambaConfig = Field(default_factory=MambaConfig, description="the fading memory")

    @property
    def n_fading(self) -> int:
        """Fading rows in a published memory."""
        return self.fading_tokens if self.fading == "chunk" else 0

    def sizes(self, d_model: int) -> dict[str, int]:
        return {**super().sizes(d_model), **{f"ssm.{name}": size for name, size in self.ssm.sizes(d_model).items()}}

    @property
    def longest_tail(self) -> int:
        return max(self.ssm.longest_tail, (self.d_conv or 1) - 1, self.predictor, self.window - 1, self._fading_tail)

    @property
    def _fading_tail(self) -> int:
        """Outputs of the state space that are carried."""
        return 2 * self.window - 1 if self.fading == "sliding" else self.n_fading

    def note(self, tokens: int) -> str | None:
        if self.fading == "chunk" and self.fading_tokens == 0:
            return (
                "no output of the state space is attended (fading_tokens=0), so its gradient is 0 and it keeps its initial values"
            )
        if tokens > self.window:
            return None
        return (
            f"its memory is first used {self.window} tokens after a document's start, so here never: the layer is attention "
            f"without positions, and its state space has a gradient of 0; take a window of less than {tokens} or longer documents"
        )

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.n_fading > self.window:
            raise ValueError(f"fading_tokens={self.fading_tokens} exceeds window={self.window}: a memory would reach behind itself")

    def footprint(self, d_model: int) -> Footprint:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width, ssm = heads * self.head_dim, kv_heads * self.head_dim, self.ssm.footprint(d_model)
        convs = () if self.d_conv is None else ("k", "v")
        return Footprint(
            parameters=(
                *(replace(parameter, name=f"ssm.{parameter.name}") for parameter in ssm.parameters),
                column("q_proj", d_model, width),
                # of the tokens, and of the fading memory's outputs
                column("kv_proj", d_model, 2 * kv_width, uses=2),
                *(split(f"conv_weights.{name}", kv_width, self.d_conv or 0) for name in convs),
                row("out_proj", width, d_model),
            ),
            kept=(
                *ssm.kept,
                # the state space's is counted there
                Kept("fading tokens", d_model, "compute", split=False),
                Kept("q", width, "compute"),
                *(Kept(f"{name} before the convolution", kv_width, "compute") for name in convs),
                Kept("k and v", 2 * kv_width, "compute"),
                Kept("fading k and v", 2 * kv_width, "compute"),
                Kept("scores", 1, "float32", split=False),
                Kept("sums of weights", heads, "float32", device="gpu"),
                Kept("memories", 2 * kv_width * (self.eidetic + self.n_fading) // self.window, "compute", device="gpu"),
                Kept("out_proj input", width, "compute"),
            ),
            carriers=(
                *(
                    replace(carrier, leaves=tuple(replace(leaf, name=f"ssm.{leaf.name}") for leaf in carrier.leaves))
                    for carrier in ssm.carriers
                ),
                *(Carrier("short_conv", (leaf,), chunk=0) for leaf in self._conv_leaves(kv_width)),
                Carrier(
                    "innovation",
                    (StateLeaf("y", (self.predictor, d_model), "compute", tp=None, grad=False),),
                    chunk=0,
                ),
                Carrier("eidetic_attention", self._attention_leaves(kv_heads), chunk=min(EIDETIC_BLOCK, self.window), remade=True),
            ),
            reductions=(
                # every rank reads the state space's output whole
                *(
                    replace(reduction, residual=reduction.residual and reduction.direction == "backward")
                    for reduction in ssm.reductions
                ),
                column_gradient("q_proj", d_model),
                column_gradient("kv_proj", d_model),
                replace(column_gradient("kv_proj of fading tokens", d_model), residual=False),
                row_sum("out_proj", d_model),
            ),
            vector_flops=ssm.vector_flops,
            attended=(
                (width, self.window),
                (width, self.n_fading + self.eidetic + (self.window if self.fading == "sliding" else 0)),
            ),
        )

    def _conv_leaves(self, kv_width: int) -> tuple[StateLeaf, ...]:
        if self.d_conv is None:
            return ()
        return tuple(StateLeaf(f"conv_{name}", (self.d_conv - 1, kv_width), "compute", tp=1) for name in "kv")

    def _attention_leaves(self, kv_heads: int) -> tuple[StateLeaf, ...]:
        found: list[StateLeaf] = []

        def rows(names: tuple[str, ...], n: int) -> None:
            found.extend(StateLeaf(name, (n, kv_heads, self.head_dim), "compute", tp=1) for name in names)

        tail, memory = self._fading_tail, self.eidetic + self.n_fading
        rows(("k", "v"), self.window - 1)
        found.append(StateLeaf("seen", (), "int64", tp=None, grad=False))
        if tail:
            rows(("fading_k", "fading_v"), tail)
        if self.eidetic:
            rows(("best_k", "best_v"), self.eidetic)
            found.append(StateLeaf("score", (self.eidetic,), "float32", tp=None, grad=False))
            found.append(StateLeaf("where", (self.eidetic,), "int64", tp=None, grad=False))
        if memory:
            rows(("frozen_k", "frozen_v"), memory)
            found.append(StateLeaf("frozen", (memory,), "bool", tp=None, grad=False))
        return tuple(found)

    @classmethod
    def small(cls) -> "BMojoConfig":
        ssm = MambaConfig(expand=3, d_state=5, d_conv=4, dt_rank=2)
        return cls(head_dim=3, heads=8, kv_heads=4, window=4, fading_tokens=2, eidetic=3, d_conv=3, predictor=2, ssm=ssm)
