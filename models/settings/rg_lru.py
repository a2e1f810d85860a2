"""Settings of the RG-LRU."""

from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Constant, LogitOfRoot, linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import EXP_FLOPS, MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, split
from baton.models.settings.linear_attention import whole
from baton.models.settings.saved_tensors import saved_by_gate


class RGLRUConfig(MixerConfig):
    """The recurrent block of Griffin and Hawk around the real-gated linear recurrent unit (De et al. 2024, arXiv:2402.19427)."""

    kind: Literal["rg_lru"] = "rg_lru"
    lru_width: int | None = Field(
        None, ge=1, description="channels of the recurrence; null: d_model, as in RecurrentGemma. About 4/3 d_model in the paper"
    )
    blocks: int = Field(16, ge=1, description="blocks of the gates' block-diagonal weights; 16 in the paper")
    d_conv: int = Field(4, ge=2, description="width of the causal convolution, in tokens; 4 in the paper")
    c: float = Field(8.0, gt=0, description="exponent of the decay at an open recurrence gate, a^(c r); 8 in the paper")
    decay_min: float = Field(0.9, gt=0, lt=1, description="smallest initial a^c; 0.9 in the paper")
    decay_max: float = Field(0.999, gt=0, lt=1, description="largest initial a^c; 0.999 in the paper")

    @model_validator(mode="after")
    def _decays_are_in_order(self) -> "RGLRUConfig":
        if self.decay_min > self.decay_max:
            raise ValueError(f"decay_min={self.decay_min} exceeds decay_max={self.decay_max}; initial decays lie between them")
        return self

    def width(self, d_model: int) -> int:
        """Channels of the recurrence."""
        return self.lru_width or d_model

    def block_width(self, d_model: int) -> int:
        """Channels of a block of the gates' weights. Raises ValueError if the blocks do not divide the channels."""
        return whole("blocks", "lru_width / blocks", self.width(d_model), self.blocks)

    def check(self, d_model: int) -> None:
        self.block_width(d_model)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"blocks": self.blocks}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        width, block = self.width(d_model), self.block_width(d_model)
        gates = (
            declaration
            for gate in ("a", "x")
            for declaration in (
                split(f"W_{gate}", self.blocks, block, block, init=linear(block), decay=True),
                split(f"b_{gate}", width, init=Constant(0.0)),
            )
        )
        return (
            column("in_proj", d_model, {"x": width, "gate": width}),
            split("conv_weight", width, self.d_conv, init=linear(self.d_conv), decay=True),
            split("conv_bias", width, init=linear(self.d_conv)),
            *gates,
            split("Lambda", width, init=LogitOfRoot(self.decay_min, self.decay_max, self.c)),
            output("out_proj", width, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        width = self.width(d_model)
        return (
            StateDeclaration("conv", (self.d_conv - 1, width), "compute", tp=1),
            StateDeclaration("h", (width,), "float32", tp=0),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        width, block = self.width(d_model), self.block_width(d_model)
        conv, h = self.state(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("x and gate", 2 * width, "compute"),
                SavedTensor("convolved x", width, "compute"),
                SavedTensor("the gates' weights", 2 * width * block, "compute", cast=True, per_token=False),
                SavedTensor("sigmoids of the gates", 2 * width, "float32"),
                SavedTensor("gated x", width, "compute"),
                SavedTensor("log_a", width, "float32"),
                # the scan's input and step sizes, which are computed by PyTorch's operators on a GPU too
                SavedTensor("scaled x and step sizes", 2 * width, "float32", in_recurrence="graph"),
                SavedTensor("scaled x and step sizes", 2 * width, "float32", in_recurrence="kernel"),
                SavedTensor("y", width, "float32", device="cpu"),
                SavedTensor("y", width, "compute", device="gpu"),
                *saved_by_gate("gate", width),
                SavedTensor("out_proj input", width, "compute"),
            ),
            recurrences=(
                RecurrenceCosts("short_conv", (conv,), chunk=0),
                RecurrenceCosts("rg_lru", (h,), chunk=1, scan_elements=width, transition=((width,),)),
            ),
            matrix_flops=4 * width * block,
            # two sigmoids, two exponentials and a square root, and the operations between them
            vector_flops=(5 * EXP_FLOPS + 16) * width,
        )

    @classmethod
    def small(cls) -> "RGLRUConfig":
        return cls(lru_width=20, blocks=4)
