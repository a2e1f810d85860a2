"""Settings of the model. Torch-free."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class GatedScanConfig(BaseModel):
    """What Mamba and Longhorn share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in every model of both papers")
    d_state: int = Field(16, ge=1, description="numbers of state per channel; 16 in every model of both papers")
    d_conv: int = Field(4, ge=2, description="tokens that the causal convolution sees; 4 as released, the papers do not say")
    dt_rank: int | None = Field(None, ge=1, description="rank of the step sizes' projection; null: d_model / 16, rounded up")


class MambaConfig(GatedScanConfig):
    """The selective state space of Mamba (Gu & Dao), one per block."""

    kind: Literal["mamba"] = "mamba"
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size (log-uniform between dt_min and dt_max)")
    dt_max: float = Field(1e-1, gt=0, description="largest initial step size")
    dt_floor: float = Field(1e-4, gt=0, description="initial step sizes are raised to this at least")
    discretization: Literal["euler", "zoh"] = Field("euler", description="of the input matrix; euler is what was released")

    @model_validator(mode="after")
    def _step_sizes_are_in_order(self) -> "MambaConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} exceeds dt_max={self.dt_max}; initial step sizes lie between them")
        return self


class LonghornConfig(GatedScanConfig):
    """The online learner of Longhorn (Liu et al.), diagonal form, one per block."""

    kind: Literal["longhorn"] = "longhorn"


MixerConfig = Annotated[MambaConfig | LonghornConfig, Field(discriminator="kind")]


class ModelConfig(BaseModel):
    """A language model: embedding, n_layers blocks of norm and mixer, final norm, tied head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    d_model: int = Field(ge=1, description="width of the residual stream")
    n_layers: int = Field(ge=1, description="number of blocks")
    vocab_size: int | None = Field(None, ge=1, description="tokens of the tokenizer; null: ask the tokenizer")
    pad_vocab_to: int = Field(8, ge=1, description="the embedding's rows are rounded up to a multiple of this")
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    decay_embedding: bool = Field(False, description="weight decay on the embedding; the paper leaves it open")
    loss_chunk: int = Field(1024, ge=1, description="tokens whose logits exist at once; a whole context's would not fit")
    mixer: MixerConfig = Field(default_factory=MambaConfig, description="what mixes tokens in every block, by its kind")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. Raises ValueError while vocab_size is not known."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not known yet: it comes from the tokenizer")
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to
