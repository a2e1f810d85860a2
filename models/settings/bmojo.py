"""Settings of B'MOJO."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from baton.models.initializers import linear
from baton.models.settings import MixerConfig
from baton.models.settings.all_reduces import AllReduce
from baton.models.settings.attention import HeadsConfig
from baton.models.settings.cost_model import EIDETIC_BLOCK, MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, split
from baton.models.settings.mamba import MambaConfig
from baton.models.settings.saved_tensors import saved_by_unit


class BMojoConfig(HeadsConfig):
    """B'MOJO (Zancato et al. 2024): attention over a window, outputs of a state space model (fading memory) and selected past
    tokens (eidetic memory). B'MOJO-F: eidetic=0.

    The paper gives the window and leaves the other sizes open. The memories are first used `window` tokens into a document. If no
    document is longer than the window, the layer is attention without positions, and the state space model's gradient is 0.
    """

    once: ClassVar[Mapping[str, Any]] = {"fading_norm": False}

    kind: Literal["bmojo"] = "bmojo"
    window: int = Field(
        512,
        ge=1,
        description="tokens in the attention window, and between updates of the memory that is attended; the paper's 512",
    )
    fading: Literal["chunk", "sliding"] = Field(
        "chunk",
        description="which outputs of the state space model are attended. chunk: the last fading_tokens outputs before the current "
        "chunk of `window` tokens, as in the paper; sliding: for every token, the outputs one to two windows before it",
    )
    fading_tokens: int = Field(
        16,
        ge=0,
        description="fading=chunk: number of outputs of the state space model in the memory; more of them give it more gradient. "
        "Algorithm 1 has one, y_{t-w} for each token t. In chunks, as the paper trains, the memory is fixed for a window: 1 is "
        "then the algorithm's token for the last token of a chunk, and a more recent one for the tokens before it",
    )
    eidetic: int = Field(64, ge=0, description="number of tokens with the largest innovation that are kept verbatim; 0: B'MOJO-F")
    d_conv: int | None = Field(
        4,
        ge=2,
        description="width of the causal convolutions of keys and values, in tokens; not in the paper. The layer has no positions, "
        "so only the convolutions tell it which token came before, as recall needs. null: no convolutions, Algorithm 1 as printed; "
        "a stack of only such layers learns recall slowly and in part (`baton experiment bmojo-figure-2`)",
    )
    predictor: int = Field(
        4, ge=1, description="number of previous outputs that predict the next one; the paper says few and gives no number"
    )
    predictor_weights: Literal["halved", "uniform"] = Field(
        "halved",
        description="weights of these outputs, normalized to sum 1 and not learned. halved: 2^-1, 2^-2, ..., the nearest first; "
        "uniform: all equal. The paper says a fixed weighted average",
    )
    innovation_norm: Literal["l2", "l1", "max"] = Field(
        "l2",
        description="norm of the prediction error over channels. l2: root mean square; l1: mean absolute value; max: maximum "
        "absolute value. The paper gives none",
    )
    fading_norm: bool = Field(
        True,
        description="whether the state space model's outputs are divided by their root mean square before they are scored and "
        "attended; not in the paper, whose form is false. Nothing else bounds them: they are a product of up to six projections, "
        "and where most documents are shorter than the window few losses depend on them. Without it 130 million parameters "
        "diverged at a learning rate of 1e-3",
    )
    add_ssm_output: bool = Field(
        False,
        description="whether each token's output of the state space model is added to the attention's; not in the paper. It is "
        "read with the token's own C, where a fading token was read with that of a past token: so the layer recalls from the "
        "state as Mamba does, and the state space model learns from every token, also in documents shorter than the window",
    )
    ssm: MambaConfig = Field(default_factory=MambaConfig, description="the state space model of the fading memory")

    @property
    def n_fading(self) -> int:
        """Number of fading tokens in the memory."""
        return self.fading_tokens if self.fading == "chunk" else 0

    def sizes(self, d_model: int) -> dict[str, int]:
        return {**super().sizes(d_model), **{f"ssm.{name}": size for name, size in self.ssm.sizes(d_model).items()}}

    @property
    def longest_tail(self) -> int:
        return max(self.ssm.longest_tail, (self.d_conv or 1) - 1, self.predictor, self.window - 1, self._fading_tail)

    @property
    def _fading_tail(self) -> int:
        """Number of past outputs of the state space model in the State."""
        return 2 * self.window - 1 if self.fading == "sliding" else self.n_fading

    def note(self, tokens: int) -> str | None:
        if self.add_ssm_output:
            return None
        if self.fading == "chunk" and self.fading_tokens == 0:
            return "no output of the state space model is attended (fading_tokens=0), so its gradient is 0 and it is not trained"
        if tokens > self.window:
            return None
        return (
            f"its memory is first used {self.window} tokens after a document's start, so here never: the layer is attention "
            f"without positions, and its state space has a gradient of 0; set a window below {tokens}, use longer documents, or "
            f"set add_ssm_output"
        )

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.n_fading > self.window:
            raise ValueError(f"fading_tokens={self.fading_tokens} exceeds window={self.window}: a memory would reach behind itself")

    @property
    def nested(self) -> dict[str, MixerConfig]:
        return {"ssm": self.ssm}

    @property
    def _convs(self) -> tuple[str, ...]:
        return () if self.d_conv is None else ("k", "v")

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width, d_conv = heads * self.head_dim, kv_heads * self.head_dim, self.d_conv or 0
        convs = (split(f"conv_weights.{name}", kv_width, d_conv, init=linear(d_conv), decay=True) for name in self._convs)
        return (
            column("q_proj", d_model, width),
            # applied twice: to the tokens, and to the state space model's outputs
            column("kv_proj", d_model, {"k": kv_width, "v": kv_width}, uses=2),
            *convs,
            output("out_proj", width, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        kv_heads = self.head_counts(d_model)[1]
        convs = (
            StateDeclaration(f"conv_{name}", ((self.d_conv or 1) - 1, kv_heads * self.head_dim), "compute", tp=1)
            for name in self._convs
        )

        def keys_and_values(prefix: str, tokens: int, *, tail: bool = False) -> tuple[StateDeclaration, ...]:
            shape = (tokens, kv_heads, self.head_dim)
            return tuple(StateDeclaration(f"{prefix}{name}", shape, "compute", tp=1, tail=tail) for name in "kv")

        state = [
            *convs,
            StateDeclaration("y", (self.predictor, d_model), "compute", tp=None, grad=False),
            *keys_and_values("", self.window - 1, tail=True),
            StateDeclaration("seen", (), "int64", tp=None, grad=False),
        ]
        if self._fading_tail:
            state += keys_and_values("fading_", self._fading_tail, tail=True)
        if self.eidetic:
            state += keys_and_values("best_", self.eidetic)
            state.append(StateDeclaration("score", (self.eidetic,), "float32", tp=None, grad=False))
            state.append(StateDeclaration("where", (self.eidetic,), "int64", tp=None, grad=False))
        if memory := self.eidetic + self.n_fading:
            state += keys_and_values("frozen_", memory)
            state.append(StateDeclaration("frozen", (memory,), "bool", tp=None, grad=False))
        return tuple(state)

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        state = self.state(d_model)
        convs, y, attention = state[: len(self._convs)], state[len(self._convs)], state[len(self._convs) + 1 :]
        memory = self.n_fading + self.eidetic
        return MixerCosts(
            saved=(
                # the mixer's input is counted with the state space model's
                SavedTensor("fading tokens", d_model, "compute", split=False),
                *(replace(x, split=False) for x in saved_by_unit("fading_norm", d_model, rows=1) if self.fading_norm),
                SavedTensor("q", width, "compute"),
                *(SavedTensor(f"{name} before the convolution", kv_width, "compute") for name in self._convs),
                SavedTensor("k and v", 2 * kv_width, "compute"),
                SavedTensor("fading k and v", 2 * kv_width, "compute"),
                SavedTensor("scores", 1, "float32", split=False),
                SavedTensor("log-sum-exp", heads, "float32", device="gpu"),
                SavedTensor("memories", 2 * kv_width * memory // self.window, "compute", device="gpu"),
                SavedTensor("out_proj input", width, "compute"),
            ),
            recurrences=(
                *(RecurrenceCosts("short_conv", (conv,), chunk=0) for conv in convs),
                RecurrenceCosts("innovation", (y,), chunk=0),
                RecurrenceCosts("eidetic_attention", attention, chunk=min(EIDETIC_BLOCK, self.window), recomputed_on_gpu=True),
            ),
            # every rank reads the state space model's whole output
            all_reduces=(AllReduce("kv_proj of fading tokens", d_model, "compute", "backward"),),
            attended=((width, self.window), (width, memory + (self.window if self.fading == "sliding" else 0))),
        )

    @classmethod
    def small(cls) -> "BMojoConfig":
        ssm = MambaConfig(expand=3, d_state=5, d_conv=4, dt_rank=2)
        return cls(head_dim=3, heads=8, kv_heads=4, window=4, fading_tokens=2, eidetic=3, d_conv=3, predictor=2, ssm=ssm)
