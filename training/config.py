"""Settings of a run's training. Torch-free."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.parallel.config import divisors
from baton.training.checkpoint.config import CheckpointConfig
from baton.training.errors import RunError
from baton.training.evaluation.config import EvaluationConfig
from baton.training.monitoring.config import GuardConfig, MonitoringConfig
from baton.training.optimizer_config import OptimizerConfig, ScheduleConfig

ComputeDtype = Literal["float32", "bfloat16"]
Recompute = Literal["none", "states", "selective", "full"]
"""Activations that the backward pass recomputes: models.lm.LanguageModel."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LengthConfig(_Settings):
    """A phase of training with shorter sequences, before training.sequence_length is used."""

    steps: int = Field(ge=1, description="optimizer steps in this phase")
    sequence_length: int = Field(
        ge=1, description="tokens per sequence in this phase; the tokens per step and per micro-batch do not change"
    )


class BatchConfig(_Settings):
    """A phase of training with a smaller batch, before training.global_batch_tokens is used."""

    steps: int = Field(ge=1, description="optimizer steps in this phase")
    global_batch_tokens: int = Field(ge=1, description="tokens per optimizer step over all ranks in this phase")


class BpttConfig(_Settings):
    """Backpropagation through time in segments. Only one segment's activations are in memory at a time."""

    mode: Literal["exact", "truncated"] = Field(
        description="exact: the gradient of the whole sequence; every segment except the last is computed twice. truncated: each "
        "lane carries its State from one step to the next, and no gradient crosses steps"
    )
    segment: int = Field(
        16384, ge=1, description="tokens per segment, over all context-parallel ranks; longer segments need more memory"
    )
    gradient_segments: int | None = Field(
        None,
        ge=1,
        description="truncated: number of segments that a gradient passes back through; null: all segments of a step. With 1, no "
        "segment is computed twice",
    )


class InitialWeightsConfig(_Settings):
    """A file with the initial parameters of a new run, or with some of them."""

    file: str = Field(description="safetensors file, as written by `baton import` or `baton checkpoint export`")
    missing: Literal["refuse", "initialise"] = Field(
        "refuse",
        description="what to do about parameters of the model that are not in the file. refuse: end. initialise: give them initial "
        "values from the seed, and name each",
    )


class TrainingConfig(_Settings):
    """Training: steps, batch, sequence length, dtypes, optimizer, checkpoints, evaluation and monitoring."""

    steps: int = Field(ge=1, description="optimizer steps in the whole run")
    sequence_length: int = Field(ge=1, description="tokens per sequence")
    sequence_length_warmup: tuple[LengthConfig, ...] = Field(
        (),
        description="shorter sequences in the first steps, for example [{steps: 1000, sequence_length: 4096}]; the tokens per step "
        "do not change",
    )
    global_batch_tokens: int = Field(ge=1, description="tokens per optimizer step over all ranks")
    batch_size_warmup: tuple[BatchConfig, ...] = Field(
        (), description="smaller batches in the first steps, for example [{steps: 1000, global_batch_tokens: 65536}]"
    )
    micro_batch_size: int = Field(
        1,
        ge=1,
        description="sequences per rank and forward pass; a larger micro-batch is faster and needs more memory. A size that does "
        "not divide a rank's sequences is reduced to the next one that does",
    )
    lanes: int | None = Field(
        None,
        ge=1,
        description="number of lanes, the independent streams of documents that sequences are read from; fixed for the lifetime of "
        "a run. null: one per sequence of the global batch",
    )
    seed: int = Field(0, ge=0, description="random seed for the initial values and for the order of the data")
    compute_dtype: ComputeDtype | None = Field(
        None,
        description="dtype of matmuls and activations; null: bfloat16 on a GPU, and float32 on a CPU, where float32 matmuls are "
        "several times faster. A run keeps the dtype it started with. Parameters, gradients, recurrent states and the optimizer "
        "are always float32",
    )
    residual_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of the residual stream and of the activations that pipeline stages exchange; bfloat16 (with "
        "compute_dtype=bfloat16) is faster, but rounds the residual stream to 8 bits after every sub-block",
    )
    initial_weights: str | InitialWeightsConfig | None = Field(
        None,
        description="safetensors file with the initial parameters of a new run, as written by `baton import` or `baton checkpoint "
        "export`, or {file: ..., missing: initialise}; null: random initial values from the seed",
    )
    recompute: Recompute | Literal["auto"] = Field(
        "auto",
        description="activations that the backward pass recomputes. none: all are kept, fastest. states: on a GPU the "
        "states between chunks of tokens, of linear attention, gated slot attention and delta rules, and what decays by key have "
        "multiplied. selective: these, and what is cheap to recompute, such as convolutions and gates: less memory; the latter "
        "without effect on sequences in segments or over ranks. full: all of a layer but its input: least memory, one more forward "
        "pass. "
        "auto: the fastest that fits the GPU's memory by `baton plan`, chosen at every start; on a CPU, none",
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="launch all kernels of a pass at once: faster where the host takes longer to launch kernels than the GPU to "
        "run them, for somewhat more memory. Possible where a GPU has all layers; in segments (bptt) on one context rank, without "
        "full attention. Hooks on modules do not run. auto: where it is possible and fits, except on a CPU",
    )
    offload_kv: bool | Literal["auto"] = Field(
        "auto",
        description="keep the keys and values that full attention reads again in later segments (bptt), and their gradients, in "
        "the host's memory, page-locked, and copy a layer's to the GPU for every pass through it: the same result with less of "
        "the GPU's memory, and time for the copies. auto: where nothing else fits the GPU's memory by `baton plan`, or only "
        "recomputation that takes longer, and the host has room for that of all its ranks; chosen at every start; on a CPU, false",
    )
    deterministic: bool = Field(True, description="raise an error for kernels whose results vary from run to run")
    log_every: int = Field(10, ge=1, description="steps between console log lines; metrics.jsonl records every step")
    callbacks: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="custom callbacks and their arguments, for example {'my_package.histograms:WeightHistograms': {every: 100}}. A "
        "key is MODULE:CLASS, or the name of an entry point in the group baton.callbacks",
    )
    replica_check_every: int = Field(
        500,
        ge=0,
        description="steps between checks that replicated tensors are bitwise equal on all ranks; the check also runs at every "
        "start and before every checkpoint. 0: never",
    )
    bptt: BpttConfig | None = Field(
        None, description="train in segments, for sequences whose activations do not fit in memory; null: whole sequences"
    )
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)

    def compute_dtype_on(self, device: str) -> ComputeDtype:
        """The compute dtype on a device of this type (torch.device.type; "meta" stands for a GPU)."""
        return self.compute_dtype or ("float32" if device == "cpu" else "bfloat16")

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step over all data ranks."""
        return self.global_batch_tokens // self.sequence_length

    @property
    def lane_count(self) -> int:
        most = max([self.global_batch_tokens, *(batch.global_batch_tokens for batch in self.batch_size_warmup)])
        return self.lanes or most // min(
            [self.sequence_length, *(length.sequence_length for length in self.sequence_length_warmup)]
        )

    @property
    def phases(self) -> tuple[tuple[int, "TrainingConfig"], ...]:
        """The phases of the run: the first step of each, and its settings with one sequence length and one batch size."""
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
        """The settings of the phase that a step is in."""
        return next(settings for first, settings in reversed(self.phases) if first <= step)

    @property
    def evaluation_tokens(self) -> int:
        """Tokens that an evaluation reads. They do not depend on the number of steps: a run that is made longer reads the same."""
        tenth = max(self.sequence_length, self.evaluation.every * self.global_batch_tokens // 10)
        return self.evaluation.tokens or (min(1_000_000, tenth) if self.evaluation.every else 1_000_000)

    @property
    def segment(self) -> int:
        """Tokens whose activations are in memory at a time, over all context-parallel ranks."""
        return self.sequence_length if self.bptt is None else min(self.bptt.segment, self.sequence_length)

    @property
    def segments(self) -> int:
        """Number of segments in a sequence."""
        return self.sequence_length // self.segment

    @property
    def gradient_segments(self) -> int:
        """Number of segments that a gradient passes back through."""
        return (self.bptt.gradient_segments if self.bptt is not None else None) or self.segments

    @property
    def carries_lane_states(self) -> bool:
        """Whether lanes carry their States from one step to the next."""
        return self.bptt is not None and self.bptt.mode == "truncated"

    def check(self, data_size: int) -> None:
        """Check that the batch divides over `data_size` data-parallel ranks. Raises RunError, which names sizes that do."""
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
        """`check` for each phase of the run."""
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
        """Check that segments divide the sequence. Raises RunError, which names sizes that do."""
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
