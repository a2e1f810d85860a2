"""A run's memory, exchange and work on one rank, counted from its settings. Torch-free.

The one thing to know: a step has three moments that can be its highest: the loss's backward pass, the layers' backward pass with
all that forward kept, and the optimizer's step, when nothing of that is left. What stays all the time is under each of them, and
the highest decides what fits. The sub-blocks' own part is in baton.models.settings, each kind's beside its settings.

All bytes are of one rank; where ranks differ (the two ends of a sequence) of the one that has most.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.models.settings.footprint import Footprint, Parameter, Work

REDUCE_BUCKET = 500_000_000
"""Numbers in a bucket of the gradients' all-reduce: reduce_bucket_size in parallel.zero, which imports torch. A test compares."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part.

    parameters, compute_copies, gradients, optimizer (ZeRO-1: master copy and two moments, of this rank's part) and states stay;
    activations are what forward keeps; in_hand is what the sub-block in hand takes in backward; loss is one chunk's logits and the
    head's gradient; buffers are what the optimizer's step takes for a moment.
    """

    parameters: int
    compute_copies: int
    gradients: int
    optimizer: int
    activations: int
    in_hand: int
    states: int
    loss: int
    buffers: int

    @property
    def peak(self) -> int:
        lasting = self.parameters + self.compute_copies + self.gradients + self.optimizer + self.states
        return lasting + max(self.activations + max(self.in_hand, self.loss), self.buffers)


@dataclass(frozen=True)
class Exchange:
    """Bytes that each rank sends per optimizer step for one purpose, in a group of `members` ranks that are `stride` apart; pairs:
    each to its neighbour, not all in a ring."""

    bytes: int
    members: int
    stride: int
    pairs: bool = False


@dataclass(frozen=True)
class Operations:
    """Of one rank per optimizer step: floating point operations on matrix units and elsewhere, bytes read and written."""

    matrix: float
    vector: float
    memory: float


class Arithmetic:
    """Of one run. Raises ConfigError for what cannot be counted."""

    def __init__(self, config: RunConfig) -> None:
        if config.layout.pipeline != 1:
            raise ConfigError(
                f"layout.pipeline={config.layout.pipeline}: a plan does not know pipeline stages; set layout.pipeline=1"
            )
        if config.model.vocab_size is None:
            raise ConfigError("model.vocab_size is not known: it comes from the tokenizer; set model.vocab_size=N")
        self.model, self.training, self.layout = config.model, config.training, config.layout
        self.tensor, self.shards = self.layout.tensor, self.layout.data * self.layout.sequence
        self.work = Work(
            batch=self.training.micro_batch,
            length=self.training.context // self.layout.sequence,
            tensor=self.tensor,
            compute_bytes=2 if self.training.precision == "bfloat16" else 4,
            gpu=config.device != "cpu",
            segment=self.layout.sequence > 1,
        )
        self.micro_batches = self.training.sequences_per_step // (self.layout.data * self.training.micro_batch)
        self.blocks: dict[str, Footprint] = {}
        for name, settings in self.model.mixers.items():
            try:
                self.blocks[name] = settings.footprint(self.model.d_model).behind_norm(self.model.d_model)
            except ValueError as error:
                raise ConfigError(f"model.mixers.{name}: {error}") from None

    # ------------------------------------------------------------------------------------------------------------ parameters

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, named as the model names it."""
        model, rows = self.model, self.model.padded_vocab_size
        tied = model.tie_embeddings
        # an embedding that is no head is only looked up, so no matmul reads it
        found = [Parameter("embedding.weight", (rows, model.d_model), split=0, uses=int(tied))]
        for number, layer in enumerate(model.layers):
            for name in layer:
                found += [replace(p, name=f"layers.{number}.{name}.{p.name}") for p in self.blocks[name].parameters]
        found.append(Parameter("norm.weight", (model.d_model,)))
        if not tied:
            found.append(Parameter("head.weight", (rows, model.d_model), split=0, uses=1))
        return tuple(found)

    @cached_property
    def parameter_count(self) -> int:
        """Of the whole model, all tensor ranks together."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def local_count(self) -> int:
        return sum(p.local(self.tensor) for p in self.parameters)

    @cached_property
    def _copied(self) -> int:
        return sum(p.local(self.tensor) for p in self.parameters if p.uses)

    @property
    def _head(self) -> int:
        return self.model.padded_vocab_size * self.model.d_model // self.tensor

    # ---------------------------------------------------------------------------------------------------------------- memory

    def layer_bytes(self, layer: tuple[str, ...]) -> int:
        """What autograd keeps of a layer."""
        return sum(self.blocks[name].kept_bytes(self.work) for name in layer)

    @cached_property
    def around_layers(self) -> int:
        """What is kept besides: tokens, labels and positions, which tokens are another tensor rank's, and float32 numbers of
        d_model: the last residual stream, what the last norm makes of it, and (see rms_norm) the normalised."""
        work = self.work
        integers = 4 * 8 + 4 + (8 + 1 if self.tensor > 1 else 0)
        return work.tokens * (integers + 4 * self.model.d_model * (2 if work.gpu else 3))

    def activations(self, *, recompute: bool) -> int:
        """What forward keeps of a micro-batch; recompute: each layer's input, and what its first run alone may decide."""
        if not recompute:
            return self.around_layers + sum(self.layer_bytes(layer) for layer in self.model.layers)
        inputs = 4 * self.model.d_model * self.work.tokens
        # what arrived from the rank before is kept with the graph
        entered = sum(block.arriving_bytes(self.work) for layer in self.model.layers for block in self._of(layer))
        return self.around_layers + len(self.model.layers) * inputs + entered

    def _of(self, layer: tuple[str, ...]) -> list[Footprint]:
        return [self.blocks[name] for name in layer]

    @property
    def states(self) -> int:
        """The States that leave, of a micro-batch."""
        return sum(block.state_bytes(self.work) for layer in self.model.layers for block in self._of(layer))

    def memory(self) -> Memory:
        """Of one rank. Adam's parts are not padded to whole ranks here: a few numbers."""
        work, recompute = self.work, self.training.recompute
        chunk = min(self.model.loss_chunk, work.tokens)
        low = work.compute_bytes == 2
        logits = chunk * self.model.padded_vocab_size // self.tensor * (4 + 2 * low)
        # a chunk's gradient of the head, in both types, and the sum over chunks; a tied one waits for the embedding's
        head = self._head * (4 + 2 * low)
        waiting = 4 * self._head
        # the gradients of what a sub-block kept are about as large as it
        in_hand = max(block.kept_bytes(work) + block.mask_bytes(work) for block in self.blocks.values())
        if recompute:
            in_hand += max(self.layer_bytes(layer) for layer in set(self.model.layers))
        part = -(-self.local_count // self.shards)
        return Memory(
            parameters=4 * self.local_count,
            compute_copies=2 * self._copied if low else 0,
            gradients=4 * self.local_count,
            optimizer=12 * part,
            activations=self.activations(recompute=recompute),
            in_hand=in_hand + (waiting if self.model.tie_embeddings else 0),
            states=self.states,
            loss=logits + head + waiting,
            # a bucket is flattened into a copy; later, a rank's part of the gradient
            buffers=4 * max(min(self.local_count, REDUCE_BUCKET), part),
        )

    # -------------------------------------------------------------------------------------------------------------- exchange

    def exchange(self) -> dict[str, Exchange]:
        """Bytes sent by each rank per optimizer step, by purpose, for rings: an all-reduce of n bytes over p ranks sends
        2 n (p - 1) / p, an all-gather n (p - 1) / p. Counts and flags of a few numbers are left out."""
        found: dict[str, Exchange] = {}
        p, shards, work = self.tensor, self.shards, self.work
        if shards > 1:
            # DeepSpeed's ZeRO-1 all-reduces the gradients whole, and gathers what each rank has updated
            found["gradients: all-reduce over data"] = Exchange(ring(2 * 4 * self.local_count, shards), shards, p)
            found["parameters: all-gather over data"] = Exchange(ring(4 * self.local_count, shards), shards, p)
        if p > 1:
            partial = 4 * sum(parameter.numel for parameter in self.parameters if parameter.partial)
            volumes = {"partial gradients": partial, **self.tensor_volumes()}
            for name, volume in volumes.items():
                if volume:
                    found[f"{name}: all-reduce over tensor"] = Exchange(ring(2 * volume, p), p, 1)
        if self.layout.sequence > 1:
            for name, backward in (("States: to the next rank", False), ("cotangents: to the rank before", True)):
                sent = sum(
                    carrier.message_bytes(work, backward=backward)
                    for layer in self.model.layers
                    for block in self._of(layer)
                    for carrier in block.carriers
                )
                found[name] = Exchange(sent * self.micro_batches, self.layout.sequence, p, pairs=True)
        if p * self.layout.sequence > 1:
            tokens = 3 * 8 * work.batch * self.training.context
            found["tokens: broadcast to tensor and sequence"] = Exchange(tokens * self.micro_batches, p * self.layout.sequence, 1)
        return found

    def tensor_volumes(self) -> dict[str, int]:
        """Bytes that are all-reduced over the tensor group per optimizer step, by purpose."""
        work, width = self.work, self.model.d_model
        bytes_of: Counter[str] = Counter()
        for layer in self.model.layers:
            blocks = self._of(layer)
            for block in blocks:
                for reduction in block.reductions:
                    bytes_of[reduction.direction] += reduction.width * work.nbytes(reduction.dtype)
                    bytes_of["again"] += (reduction.direction == "forward") * reduction.width * work.nbytes(reduction.dtype)
            # recomputation ends with the last tensor that backward needs, which goes into the layer's last sum
            bytes_of["again"] -= width * work.compute_bytes
        # largest logit, own logit and sum of exponentials, twice: a chunk's loss is computed again for its gradients
        loss = 2 * 3 * 4 + width * work.compute_bytes
        per_token = {
            "embedding": 4 * width,
            "layers forward": bytes_of["forward"] + self.training.recompute * bytes_of["again"],
            "layers backward": bytes_of["backward"],
            "loss": loss,
        }
        return {name: volume * work.tokens * self.micro_batches for name, volume in per_token.items()}

    # ------------------------------------------------------------------------------------------------------------------ work

    def operations(self) -> Operations:
        """Of one rank per optimizer step.

        A matmul runs once forwards and twice backwards; a recurrence's chunks run again in backward as well, and so does the head.
        Memory: what forward keeps is written, read by what follows and read again in backward, and its gradient is written and
        read; of parameters the compute copy is read three times and a gradient made and added; the step reads and writes whole
        gradients, Adam's parts and the parameters.
        """
        training, work, again = self.training, self.work, int(self.training.recompute)
        tokens = work.tokens * self.micro_batches
        matmuls = 2 * sum(
            p.uses * p.local(self.tensor) * (4 if p.name in ("embedding.weight", "head.weight") else 3 + again)
            for p in self.parameters
        )
        matrix = vector = 0.0
        for layer in self.model.layers:
            for block in self._of(layer):
                own_matrix, own_vector = block.recurrence_flops(training.context)
                matrix, vector = matrix + own_matrix / self.tensor, vector + own_vector / self.tensor
        kept = self.activations(recompute=False) * (5 + 2 * again)
        weights = self._copied * (3 * work.compute_bytes + (12 if work.compute_bytes == 2 else 8))
        part = self.local_count / self.shards
        step = 32 * self.local_count + 28 * part + (6 * self._copied if work.compute_bytes == 2 else 0)
        return Operations(
            matrix=tokens * (matmuls + (4 + again) * matrix),
            vector=tokens * (4 + again) * vector,
            memory=self.micro_batches * (kept + weights) + step,
        )

    def useful_flops(self) -> float:
        """Per token and training step, of the whole model: matmuls and recurrences once forwards and twice backwards."""
        flops = 2.0 * sum(p.uses * p.numel for p in self.parameters)
        for layer in self.model.layers:
            for block in self._of(layer):
                flops += sum(block.recurrence_flops(self.training.context))
        return 3 * flops


def ring(volume: int, members: int) -> int:
    """volume (members - 1) / members, in whole bytes."""
    return volume * (members - 1) // members
