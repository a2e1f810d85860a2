"""Settings of the evaluation during training. Torch-free."""

from pydantic import BaseModel, ConfigDict, Field


class EvaluationConfig(BaseModel):
    """Evaluation during training: loss, bits per byte and a text sample; for a synthetic task, loss and accuracy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every: int = Field(
        1000, ge=0, description="steps between evaluations; the last step is always evaluated. 0: no evaluation at all"
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of the validation split that are evaluated, the same ones each time; for a synthetic task, tokens per "
        "case. null: a tenth of the tokens that are trained from one evaluation to the next, at most 1,000,000",
    )
    sample_tokens: int = Field(
        128, ge=0, description="tokens of the text sample generated at each evaluation; 0: no sample. Ignored for synthetic tasks"
    )
    long_tokens: int = Field(
        0,
        ge=0,
        description="tokens per row of the long-context evaluation, which reports the loss by position and the norms of States on "
        "the longest validation documents. It uses the memory of one segment. 0: no long-context evaluation",
    )
    long_rows: int = Field(
        8,
        ge=1,
        description="rows of the long-context evaluation; the longest documents are distributed over them, and a row continues "
        "with another document where one ends",
    )
    gradient_reach_segment_length: int = Field(
        0,
        ge=0,
        description="tokens per segment of the gradient-reach measurement, which reports the norms of the gradient of the last "
        "segment's loss with respect to the States 1, 2, ... segments earlier, on the first long rows; 0: no measurement",
    )
    gradient_reach_segments: int = Field(32, ge=2, description="segments that the gradient is propagated back through")

    @property
    def long_rows_tokens(self) -> int:
        """Tokens per row that the long-context evaluation and the gradient-reach measurement read; 0 if both are off."""
        return max(self.long_tokens, self.gradient_reach_segment_length * self.gradient_reach_segments) if self.every else 0
