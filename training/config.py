"""Settings of a run's training. Torch-free."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.parallel.config import divisors
from baton.training.checkpoint.config import CheckpointConfig
from baton.training.errors import RunError
from baton.training.monitoring.config import GuardConfig, MonitoringConfig

Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]
ComputeDtype = Literal["float32", "bfloat16"]
Recompute = Literal["none", "selective", "full"]
"""Activations that the backward pass recomputes: models.lm.LanguageModel."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimizerConfig(_Settings):
    """AdamW with a global gradient norm clip."""

    lr: float = Field(gt=0, description="peak learning rate")
    lr_overrides: dict[str, Rate] = Field(
        default_factory=dict, description="peak learning rate of parameters by name, as {'*.ssm.*': 1e-3}; the first match counts"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="decay of the two moments; as in Mamba's recipe")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not applied to norms, biases, A_log, D")
    clip_norm: float = Field(1.0, ge=0, description="global gradient norm above which gradients are scaled down; 0: never")


class ScheduleConfig(_Settings):
    """Learning rate over steps: linear warm-up, then cosine or warmup-stable-decay (WSD)."""

    kind: Literal["cosine", "wsd", "constant"] = Field("cosine", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0; 0: none. Papers take 1 to 10 % of a run")
    decay_steps: int = Field(0, ge=0, description="wsd: steps of linear decay at the end")
    final_lr: float = Field(1e-5, ge=0, description="learning rate at the last step (cosine, wsd); absolute, as in the papers")


class LengthConfig(_Settings):
    """Steps on shorter sequences, before those of training.sequence_length."""

    steps: int = Field(ge=1, description="optimizer steps")
    sequence_length: int = Field(ge=1, description="tokens per sequence; a step has as many tokens as ever, and a micro-batch too")


class BatchConfig(_Settings):
    """Steps with fewer tokens, before those of training.global_batch_tokens."""

    steps: int = Field(ge=1, description="optimizer steps")
    global_batch_tokens: int = Field(ge=1, description="tokens per optimizer step, all ranks together")


class BpttConfig(_Settings):
    """Backpropagation through time in segments: only one segment's activations are kept at a time."""

    mode: Literal["exact", "truncated"] = Field(
        description="exact: the gradient of the whole sequence, each segment but the last one computed twice; truncated: each lane "
        "carries its State from step to step, and the gradient is cut"
    )
    segment: int = Field(16384, ge=1, description="tokens of a segment, all its sequence ranks together; more: more memory")
    gradient_segments: int | None = Field(
        None,
        ge=1,
        description="truncated: segments that a gradient goes back through; null: all of a step's. 1 computes nothing twice",
    )


class EvaluationConfig(_Settings):
    """Loss and bits per byte on the validation split, and a sample of text; loss and accuracy on a synthetic task."""

    every: int = Field(1000, ge=0, description="steps between evaluations, and one after the last step; 0: none at all")
    tokens: int = Field(1_000_000, ge=1, description="tokens of the validation split, always the same ones; of a synthetic "
                        "task, tokens of each case")  # fmt: skip
    sample_tokens: int = Field(128, ge=0, description="tokens of the text sample written beside each evaluation; 0: none. A "
                               "synthetic task has no text")  # fmt: skip
    long_tokens: int = Field(0, ge=0, description="tokens of each row of the longest validation documents, whose loss by position "
                             "and norms of States are written, at the memory of one segment; 0: none")  # fmt: skip
    long_rows: int = Field(8, ge=1, description="such rows; the longest documents are dealt to them, so that a row goes on with "
                           "another where one ends")  # fmt: skip
    gradient_reach_segment_length: int = Field(
        0,
        ge=0,
        description="tokens of a segment; norms of the gradient of the last segment's loss with respect to the States one, two, "
        "... segments before it are written, for the first long rows; 0: none",
    )
    gradient_reach_segments: int = Field(32, ge=2, description="segments that the gradient is followed back through")

    @property
    def long_rows_tokens(self) -> int:
        """Tokens of a long row that are read; 0: nobody looks at any."""
        return max(self.long_tokens, self.gradient_reach_segment_length * self.gradient_reach_segments) if self.every else 0


class TrainingConfig(_Settings):
    """The run's training: steps, batch, sequence length, dtypes, optimizer, and everything around its steps."""

    steps: int = Field(ge=1, description="optimizer steps of the whole run")
    sequence_length: int = Field(ge=1, description="tokens per sequence")
    sequence_length_warmup: tuple[LengthConfig, ...] = Field(
        (),
        description="shorter sequences in the first steps, as [{steps: 1000, sequence_length: 4096}]; a step has as many tokens",
    )
    global_batch_tokens: int = Field(ge=1, description="tokens per optimizer step, all ranks together")
    batch_size_warmup: tuple[BatchConfig, ...] = Field(
        (), description="smaller batches in the first steps, as [{steps: 1000, global_batch_tokens: 65536}]"
    )
    micro_batch_size: int = Field(1, ge=1, description="sequences per rank and forward pass; more: faster, more memory; "
                             "one that does not divide a rank's sequences is cut to the next size that does")  # fmt: skip
    lanes: int | None = Field(None, ge=1, description="independent streams of documents, fixed for the run's life; null: one "
                              "per sequence of the global batch")  # fmt: skip
    seed: int = Field(0, ge=0, description="of the initial values and of the order of the data")
    compute_dtype: ComputeDtype | None = Field(
        None,
        description="dtype of matmuls and activations; null: bfloat16 on a GPU, float32 on a CPU, which multiplies float32 several "
        "times faster; a run keeps the dtype that it began with. Parameters, gradients, scan states and the optimizer stay fp32",
    )
    residual_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of the residual stream, and of the activations that pipeline stages send; bfloat16, with "
        "compute_dtype=bfloat16: faster, but every sub-block's sum is rounded to 8 bits",
    )
    initial_weights: str | None = Field(None, description="a safetensors file, as `baton checkpoint export` writes, that a new run "
                                        "begins with; null: values from the seed")  # fmt: skip
    recompute: Recompute | Literal["auto"] = Field(
        "auto",
        description="activations that the backward pass recomputes. none: all are kept, fastest. selective: those that are "
        "cheap to recompute, such as convolutions and gates: less memory; without effect on sequences in segments or "
        "over ranks, and not with cuda_graphs=true. full: all of a layer but its input: least memory, one more forward pass. "
        "auto: the fastest that fits the GPU's memory by `baton plan`, chosen at every start; on a CPU, none",
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="launch all kernels of a pass at once: faster where the host takes longer to launch kernels than the GPU to "
        "run them, for somewhat more memory. Possible where a GPU has all layers and whole sequences; hooks on modules do not run. "
        "auto: where it is possible and fits, except on a CPU",
    )
    deterministic: bool = Field(True, description="refuse kernels whose result varies from run to run")
    log_every: int = Field(10, ge=1, description="steps between lines on the console; metrics.jsonl gets every step")
    callbacks: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="callbacks of your own with their arguments, as {'my_package.histograms:WeightHistograms': {every: 100}}: a "
        "module path, or the name of an entry point of the group baton.callbacks",
    )
    replica_check_every: int = Field(500, ge=0, description="steps between comparisons of what ranks must hold to the bit; also at "
                                     "every start and before every checkpoint; 0: never")  # fmt: skip
    bptt: BpttConfig | None = Field(None, description="segments, for contexts whose activations do not fit; null: whole sequences"
                                    )  # fmt: skip
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)

    def compute_dtype_on(self, device: str) -> ComputeDtype:
        """The precision, where models live on a device of this type (torch.device's; meta stands for a GPU)."""
        return self.compute_dtype or ("float32" if device == "cpu" else "bfloat16")

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step, all data ranks together."""
        return self.global_batch_tokens // self.sequence_length

    @property
    def lane_count(self) -> int:
        most = max([self.global_batch_tokens, *(batch.global_batch_tokens for batch in self.batch_size_warmup)])
        return self.lanes or most // min(
            [self.sequence_length, *(length.sequence_length for length in self.sequence_length_warmup)]
        )

    @property
    def phases(self) -> tuple[tuple[int, "TrainingConfig"], ...]:
        """The first step of each shape of steps, and the settings from there on: one length, one batch, and the run's lanes."""
        contexts, first = {}, 0
        for length in self.sequence_length_warmup:
            contexts[first] = length.sequence_length
            first += length.steps
        contexts[first] = self.sequence_length
        batches, first = {}, 0
        for batch in self.batch_size_warmup:
            batches[first] = batch.global_batch_tokens
            first += batch.steps
        batches[first] = self.global_batch_tokens
        found, sequence_length, tokens = [], 0, 0
        for first in sorted(contexts.keys() | batches.keys()):
            sequence_length, tokens = contexts.get(first, sequence_length), batches.get(first, tokens)
            found.append((first, self._at(sequence_length, tokens)))
        return tuple(found)

    def _at(self, sequence_length: int, tokens: int) -> "TrainingConfig":
        changes = {
            "sequence_length": sequence_length,
            "micro_batch_size": self.micro_batch_size * self.sequence_length // sequence_length,
            "lanes": self.lane_count,
        }
        return self.model_copy(
            update={**changes, "global_batch_tokens": tokens, "sequence_length_warmup": (), "batch_size_warmup": ()}
        )

    def at(self, step: int) -> "TrainingConfig":
        """The settings of a step, whose sequences are all of one length."""
        return next(settings for first, settings in reversed(self.phases) if first <= step)

    @property
    def segment(self) -> int:
        """Tokens that are kept for backward at a time, all sequence ranks together."""
        return self.sequence_length if self.bptt is None else min(self.bptt.segment, self.sequence_length)

    @property
    def segments(self) -> int:
        """Segments of a sequence."""
        return self.sequence_length // self.segment

    @property
    def gradient_segments(self) -> int:
        """Segments that a gradient goes back through."""
        return (self.bptt.gradient_segments if self.bptt is not None else None) or self.segments

    @property
    def carries_lane_states(self) -> bool:
        """Whether lanes carry their States from step to step."""
        return self.bptt is not None and self.bptt.mode == "truncated"

    def check(self, data_size: int) -> None:
        """Refuse a batch that does not divide. data_size: data-parallel ranks. Raises RunError naming sizes that would work."""
        if self.sequence_length_warmup or self.batch_size_warmup:
            self._check_phases(data_size)
            return
        if self.global_batch_tokens % self.sequence_length:
            down = self.global_batch_tokens // self.sequence_length * self.sequence_length
            raise RunError(
                f"training.global_batch_tokens={self.global_batch_tokens} is not a multiple of "
                f"training.sequence_length={self.sequence_length}; nearest that are: "
                f"{' and '.join(str(n) for n in (down, down + self.sequence_length) if n)}"
            )
        g = self.sequences_per_step
        if g % data_size:
            raise RunError(
                f"layout.data={data_size} does not divide the {g} sequences of a step "
                f"(training.global_batch_tokens / training.sequence_length); layout.data that would: {divisors(g)}"
            )
        if self.lane_count < g:
            raise RunError(
                f"training.lanes={self.lane_count} is less than the {g} sequences of a step, which come from as many lanes; "
                f"set training.lanes to {g} or more, or null"
            )
        if self.lane_count % data_size:
            raise RunError(
                f"training.lanes={self.lane_count} is not a multiple of layout.data={data_size}; "
                f"nearest that is: {math.ceil(self.lane_count / data_size) * data_size}"
            )
        if (g // data_size) % self.micro_batch_size:
            raise RunError(
                f"training.micro_batch_size={self.micro_batch_size} does not divide the {g // data_size} sequences that a data "
                f"rank takes per step; sizes that do: {divisors(g // data_size)}"
            )
        self._check_segments()
        if self.residual_dtype == "bfloat16" and self.compute_dtype == "float32":
            raise RunError(
                f"training.residual_dtype=bfloat16 does not go with training.compute_dtype={self.compute_dtype}: what is "
                f"added to the residual stream would be more precise than the sum; set training.residual_dtype=float32"
            )
        if self.schedule.kind == "wsd" and self.schedule.decay_steps + self.schedule.warmup_steps > self.steps:
            raise RunError(
                f"training.schedule: warmup_steps={self.schedule.warmup_steps} and decay_steps={self.schedule.decay_steps} "
                f"together exceed training.steps={self.steps}"
            )

    def _check_phases(self, data_size: int) -> None:
        """The same for each shape of steps."""
        for number, length in enumerate(self.sequence_length_warmup):
            if self.sequence_length % length.sequence_length:
                raise RunError(
                    f"training.sequence_length_warmup.{number}.sequence_length={length.sequence_length} does not divide "
                    f"training.sequence_length={self.sequence_length}, and no number of such sequences makes the same "
                    f"micro-batch; those that do: {divisors(self.sequence_length)}"
                )
        for number, (first, settings) in enumerate(self.phases):
            try:
                settings.check(data_size)
            except RunError as error:
                if number + 1 == len(self.phases):
                    raise
                where = f"from step {first}" if self.batch_size_warmup else f"training.sequence_length_warmup.{number}"
                raise RunError(f"{where}: {error}") from None
        for name, parts, then in (
            ("sequence_length_warmup", self.sequence_length_warmup, "training.sequence_length"),
            ("batch_size_warmup", self.batch_size_warmup, "training.global_batch_tokens"),
        ):
            steps = sum(part.steps for part in parts)
            if steps >= self.steps:
                raise RunError(
                    f"training.{name} takes {steps} steps, all of training.steps={self.steps}; leave some for {then}, "
                    f"or set that to the last one of these"
                )

    def _check_segments(self) -> None:
        """Refuse segments that do not divide. Raises RunError naming sizes that would."""
        if self.bptt is None:
            return
        if self.sequence_length % self.segment:
            sizes = divisors(self.sequence_length)
            nearest = [max(n for n in sizes if n < self.segment), min(n for n in sizes if n > self.segment)]
            raise RunError(
                f"training.bptt.segment={self.segment} does not divide training.sequence_length={self.sequence_length}; "
                f"nearest that do: {nearest}"
            )
        wanted = self.bptt.gradient_segments
        if wanted is not None and self.bptt.mode == "exact":
            raise RunError(
                f"training.bptt.gradient_segments={wanted} with mode=exact, whose gradient goes through all segments; "
                f"set it to null, or training.bptt.mode=truncated"
            )
        if wanted is not None and self.segments % wanted:
            raise RunError(
                f"training.bptt.gradient_segments={wanted} does not divide the {self.segments} segments of a sequence "
                f"(training.sequence_length / training.bptt.segment), and no gradient goes from step to step; those that do: "
                f"{divisors(self.segments)}"
            )
