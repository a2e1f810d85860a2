"""A run's memory, exchange and work on one rank, counted from its settings. Torch-free.

The one thing to know: a step has three moments that can be its highest: the loss's backward pass, the layers' backward pass with
all that forward kept, and the optimizer's step, when nothing of that is left. What stays all the time is under each of them, and
the highest decides what fits. The sub-blocks' own part is in baton.models.settings, each kind's beside its settings.

All bytes are of one rank of one pipeline stage; where its ranks differ (the two ends of a sequence) of the one that has most.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.models.settings.footprint import Footprint, Parameter, Work
from baton.models.stages import Stage, cut, whole

REDUCE_BUCKET = 500_000_000
"""Numbers in a bucket of the gradients' all-reduce: reduce_bucket_size in parallel.zero, which imports torch. A test compares."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part.

    parameters, compute_copies, gradients, optimizer (two moments of all that the rank has; from ZeRO-1 on they and a master copy,
    of its part) and states stay; activations are what forward keeps, of all micro-batches on their way through the stages; in_hand
    is what the sub-block in hand takes in backward; loss is one chunk's logits and the head's gradient; buffers are what the
    optimizer's step takes for a moment.
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
    each to its neighbour, not all in a ring; once: when all micro-batches are done, not with each of them."""

    bytes: int
    members: int
    stride: int
    pairs: bool = False
    once: bool = False


@dataclass(frozen=True)
class Operations:
    """Of one rank per optimizer step: floating point operations on matrix units and elsewhere, bytes read and written by the
    micro-batches, and by the update."""

    matrix: float
    vector: float
    memory: float
    update: float


class Arithmetic:
    """Of one stage of a run. Raises ConfigError for what cannot be counted.

    stage: one of models.stages.cut; None: the run's only one.
    """

    def __init__(self, config: RunConfig, stage: Stage | None = None) -> None:
        if config.model.vocab_size is None:
            raise ConfigError("model.vocab_size is not known: it comes from the tokenizer; set model.vocab_size=N")
        stage = stage or whole(config.model)
        assert stage.count == config.layout.pipeline
        self.model, self.training, self.layout, self.stage = config.model, config.training, config.layout, stage
        self.layers = tuple(config.model.layers[n] for n in stage.layers)
        self.tensor, self.shards = self.layout.tensor, self.layout.data * self.layout.sequence
        self.work = Work(
            batch=self.training.micro_batch,
            length=self.training.context // self.layout.sequence,
            tensor=self.tensor,
            compute_bytes=2 if self.training.precision == "bfloat16" else 4,
            gpu=config.device != "cpu",
            segment=self.layout.sequence > 1,
            split_residual=self.layout.split_residual and self.tensor > 1,
        )
        self.micro_batches = self.training.sequences_per_step // (self.layout.data * self.training.micro_batch)
        self.in_flight = min(stage.count - stage.index, self.micro_batches)
        """Micro-batches whose activations are kept at once: one forward, one backward (1F1B)."""
        self.blocks: dict[str, Footprint] = {}
        for name, settings in self.model.mixers.items():
            if not any(name in layer for layer in self.layers):
                continue
            try:
                self.blocks[name] = settings.footprint(self.model.d_model).behind_norm(self.model.d_model)
            except ValueError as error:
                raise ConfigError(f"model.mixers.{name}: {error}") from None

    # ------------------------------------------------------------------------------------------------------------ parameters

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter that belongs to the stage, named as the model names it."""
        model, stage, found = self.model, self.stage, []
        tied = model.tie_embeddings
        if stage.first:
            # an embedding that is no head here is only looked up, so no matmul reads it
            found.append(self._embedding(uses=int(tied and stage.last)))
        for number, layer in zip(stage.layers, self.layers, strict=True):
            for name in layer:
                found += [replace(p, name=f"layers.{number}.{name}.{p.name}") for p in self.blocks[name].parameters]
        if stage.last:
            found.append(Parameter("norm.weight", (model.d_model,)))
            if not tied:
                found.append(Parameter("head.weight", (model.padded_vocab_size, model.d_model), split=0, uses=1))
        # what reads a part of the tokens, or what every rank computes alike, gets a part of its gradient
        return tuple(replace(p, partial=True) if self.work.split_residual and p.split is None else p for p in found)

    @cached_property
    def lent(self) -> tuple[Parameter, ...]:
        """Parameters of another stage that this one reads: it has their values and gradients, and no optimizer for them."""
        return (self._embedding(uses=1),) if self.model.tie_embeddings and self.stage.last and not self.stage.first else ()

    def _embedding(self, uses: int) -> Parameter:
        return Parameter("embedding.weight", (self.model.padded_vocab_size, self.model.d_model), split=0, uses=uses)

    @cached_property
    def parameter_count(self) -> int:
        """Of the stage, all tensor ranks together."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def local_count(self) -> int:
        """Numbers that this rank updates, together with the ranks that have other tokens."""
        return sum(p.local(self.tensor) for p in self.parameters)

    @cached_property
    def _held(self) -> int:
        return self.local_count + sum(p.local(self.tensor) for p in self.lent)

    @cached_property
    def _copied(self) -> int:
        return sum(p.local(self.tensor) for p in (*self.parameters, *self.lent) if p.uses)

    @property
    def _part(self) -> int:
        """Numbers whose optimizer this rank has. They are not padded to whole ranks here: a few."""
        return self.local_count if self.layout.zero == 0 else -(-self.local_count // self.shards)

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
        d_model: the last residual stream, and on the last stage what the norm makes of it and (see rms_norm) the normalised. Where
        ranks share the stream, what the norm makes of it is gathered, in the compute type."""
        work, stage = self.work, self.stage
        integers = 2 * 8 + 4 + (2 * 8 if stage.last else 0) + (8 + 1 if self.tensor > 1 and stage.first else 0)
        streams = 1 if work.gpu or not stage.last else 2
        normed = work.nbytes("compute") if work.split_residual else 4
        return work.tokens * (integers + normed * self.model.d_model * stage.last) + self.hidden_bytes * streams

    def activations(self, *, recompute: bool) -> int:
        """What forward keeps of a micro-batch; recompute: each layer's input, and what its first run alone may decide."""
        if not recompute:
            return self.around_layers + sum(self.layer_bytes(layer) for layer in self.layers)
        # what arrived from the rank before is kept with the graph
        entered = sum(block.arriving_bytes(self.work) for layer in self.layers for block in self._of(layer))
        return self.around_layers + len(self.layers) * self.hidden_bytes + entered

    @property
    def hidden_bytes(self) -> int:
        """The float32 hidden vectors of a micro-batch, or their gradient: what stages hand on. Shared, this rank's part."""
        return 4 * self.model.d_model * self.work.stream_tokens

    @property
    def _expected(self) -> int:
        """Messages of other stages that have memory: the one being read, which forwards is the first layer's input and counted
        there, and the next one."""
        return self.hidden_bytes * (int(not self.stage.first) + 2 * int(not self.stage.last))

    def _of(self, layer: tuple[str, ...]) -> list[Footprint]:
        return [self.blocks[name] for name in layer]

    @property
    def states(self) -> int:
        """The States that leave, of a micro-batch."""
        return sum(block.state_bytes(self.work) for layer in self.layers for block in self._of(layer))

    def memory(self) -> Memory:
        """Of one rank."""
        work, recompute = self.work, self.training.recompute
        low = work.compute_bytes == 2
        loss = waiting = 0
        if self.stage.last:
            logits = min(self.model.loss_chunk, work.tokens) * self.model.padded_vocab_size // self.tensor * (4 + 2 * low)
            # a chunk's gradient of the head, in both types, and the sum over chunks; a tied one waits for the embedding's
            loss = logits + self._head * (4 + 2 * low) + 4 * self._head
            waiting = 4 * self._head if self.model.tie_embeddings and self.stage.first else 0
        # the gradients of what a sub-block kept are about as large as it
        in_hand = max(block.kept_bytes(work) + block.mask_bytes(work) for block in self.blocks.values())
        if recompute:
            in_hand += max(self.layer_bytes(layer) for layer in set(self.layers))
        return Memory(
            parameters=4 * self._held,
            compute_copies=2 * self._copied if low else 0,
            gradients=4 * self._held,
            # without ZeRO the parameters are the masters
            optimizer=(12 if self.layout.zero else 8) * self._part,
            activations=self.in_flight * self.activations(recompute=recompute) + self._expected,
            in_hand=in_hand + waiting,
            states=self.states,
            loss=loss,
            # a bucket is flattened into a copy; later, a rank's part of the gradient
            buffers=4 * max(min(self.local_count, REDUCE_BUCKET), self._part if self.layout.zero else 0),
        )

    # -------------------------------------------------------------------------------------------------------------- exchange

    def exchange(self) -> dict[str, Exchange]:
        """Bytes sent by each rank per optimizer step, by purpose, for rings: an all-reduce of n bytes over p ranks sends
        2 n (p - 1) / p, an all-gather n (p - 1) / p. Counts and flags of a few numbers are left out."""
        return {**self._exchange_over_data(), **self._exchange_over_tensor(), **self._exchange_of_neighbours()}

    def _exchange_over_data(self) -> dict[str, Exchange]:
        shards, p, n = self.shards, self.tensor, 4 * self.local_count
        if shards == 1:
            return {}
        # DeepSpeed's ZeRO-0 and ZeRO-1 all-reduce the gradients whole; ZeRO-2 reduces each piece to its owner
        if self.layout.zero == 2:
            found = {"gradients: reduce to owners over data": Exchange(ring(n, shards), shards, p, once=True)}
        else:
            found = {"gradients: all-reduce over data": Exchange(ring(2 * n, shards), shards, p, once=True)}
        if self.layout.zero:
            found["parameters: all-gather over data"] = Exchange(ring(n, shards), shards, p, once=True)
        return found

    def _exchange_over_tensor(self) -> dict[str, Exchange]:
        p = self.tensor
        partial = 4 * sum(parameter.numel for parameter in self.parameters if parameter.partial)
        volumes = {("partial gradients", "all-reduce"): partial, **self.tensor_volumes()}
        return {
            f"{purpose}: {collective} over tensor": Exchange(
                ring((2 if collective == "all-reduce" else 1) * volume, p), p, 1, once=purpose == "partial gradients"
            )
            for (purpose, collective), volume in volumes.items()
            if volume and p > 1
        }

    def _exchange_of_neighbours(self) -> dict[str, Exchange]:
        found: dict[str, Exchange] = {}
        p, layout, stage = self.tensor, self.layout, self.stage
        if layout.sequence > 1:
            carriers = [carrier for layer in self.layers for block in self._of(layer) for carrier in block.carriers]
            gathered = [carrier for carrier in carriers if carrier.transition and layout.state_exchange == "gather"]
            for name, backward in (("States: to the next rank", False), ("cotangents: to the rank before", True)):
                sent = sum(one.message_bytes(self.work, backward=backward) for one in carriers if one not in gathered)
                if sent:
                    found[name] = Exchange(sent * self.micro_batches, layout.sequence, p, pairs=True)
            effects = sum(carrier.effect_bytes(self.work) for carrier in gathered)
            if effects:
                volume = (layout.sequence - 1) * effects * self.micro_batches
                for name in ("States: all-gather over sequence", "cotangents: all-gather over sequence"):
                    found[name] = Exchange(volume, layout.sequence, p)
        between = p * layout.sequence * layout.data
        hidden = Exchange(self.hidden_bytes * self.micro_batches, stage.count, between, pairs=True)
        if not stage.last:
            found["hidden vectors: to the next stage"] = hidden
        if not stage.first:
            found["gradients of hidden vectors: to the stage before"] = hidden
        if self.model.tie_embeddings and stage.first != stage.last:
            name = "tied embedding: values to the last stage" if stage.first else "tied embedding: gradient to the first stage"
            found[name] = Exchange(4 * self._head, 2, (stage.count - 1) * between, pairs=True, once=True)
        readers = p * layout.sequence * layout.pipeline
        if readers > 1:
            tokens = 3 * 8 * self.work.batch * self.training.context
            # with stages the readers of a lane are as far apart as the ranks that read others
            stride = 1 if layout.pipeline == 1 else layout.data
            found["tokens: broadcast to all that need them"] = Exchange(tokens * self.micro_batches, readers, stride)
        return found

    def tensor_volumes(self) -> dict[tuple[str, str], int]:
        """Bytes of the whole tensors that are all-reduced, all-gathered or reduce-scattered over the tensor group per optimizer
        step, by purpose and collective."""
        work, shared, again = self.work, self.work.split_residual, int(self.training.recompute)
        # of d_model numbers per token in the compute type
        vectors = self.model.d_model * work.compute_bytes * (work.stream_tokens * self.tensor if shared else work.tokens)
        both, found = ("all-gather", "reduce-scatter"), Counter[tuple[str, str]]()
        for layer in self.layers:
            for reduction in (reduction for block in self._of(layer) for reduction in block.reductions):
                if not (shared and reduction.residual):
                    volume = work.tokens * reduction.width * work.nbytes(reduction.dtype)
                    runs = 1 + again * (reduction.direction == "forward")
                    found[f"layers {reduction.direction}", "all-reduce"] += runs * volume
            for collective in both if shared else ():
                found["layers forward", collective] += (1 + again) * len(layer) * vectors
                found["layers backward", collective] += len(layer) * vectors
            # recomputation ends with the last tensor that backward needs, which goes into the layer's last sum
            found["layers forward", "reduce-scatter" if shared else "all-reduce"] -= again * vectors
        if self.stage.first:
            for collective in both if shared else ("all-reduce",):
                found["embedding", collective] += vectors * 4 // work.compute_bytes
        if self.stage.last:
            # largest logit, own logit and sum of exponentials, twice: a chunk's loss is computed again for its gradients
            found["loss", "all-reduce"] += 2 * 3 * 4 * work.tokens
            for collective in both if shared else ("all-reduce",):
                found["loss", collective] += vectors
        return {name: volume * self.micro_batches for name, volume in found.items() if volume}

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
            for p in (*self.parameters, *self.lent)
        )
        matrix = vector = 0.0
        for layer in self.layers:
            for block in self._of(layer):
                own_matrix, own_vector = block.recurrence_flops(training.context)
                matrix, vector = matrix + own_matrix / self.tensor, vector + own_vector / self.tensor
        kept = self.activations(recompute=False) * (5 + 2 * again)
        weights = self._copied * (3 * work.compute_bytes + (12 if work.compute_bytes == 2 else 8))
        update = 32 * self.local_count + 28 * self._part + (6 * self._copied if work.compute_bytes == 2 else 0)
        return Operations(
            matrix=tokens * (matmuls + (4 + again) * matrix),
            vector=tokens * (4 + again) * vector,
            memory=self.micro_batches * (kept + weights),
            update=update,
        )

    def useful_flops(self) -> float:
        """Per token and training step, of the stage on all tensor ranks: matmuls and recurrences once forwards, twice backwards."""
        flops = 2.0 * sum(p.uses * p.numel for p in (*self.parameters, *self.lent))
        for layer in self.layers:
            for block in self._of(layer):
                flops += sum(block.recurrence_flops(self.training.context))
        return 3 * flops


def of_stages(config: RunConfig) -> tuple[Arithmetic, ...]:
    """Of every stage, in order. Raises ConfigError or LayoutError for what cannot be counted or cut."""
    stages = cut(config.model, config.layout.pipeline, config.training.context)
    return tuple(Arithmetic(config, stage) for stage in stages)


def ring(volume: int, members: int) -> int:
    """volume (members - 1) / members, in whole bytes."""
    return volume * (members - 1) // members
