"""Counts a run's memory and work on one rank from its settings. Torch-free.

A step has three candidates for its peak memory: the backward pass of the loss, the backward pass of the layers with all saved
activations, and the optimizer's step, which needs no activations. Permanent memory is added to each, and the maximum decides
whether a run fits. The costs of sub-blocks are in baton.models.settings, and what ranks exchange in
baton.launcher.planner.comm_volume.

A pass is the forward and backward pass of one segment of a micro-batch; without segments, of a whole micro-batch. A survey is a
no-grad forward pass over a segment, which computes only its final State. All bytes are those of one rank of one pipeline stage. If
the ranks of a stage differ (the two ends of a sequence), they are those of the rank with the most.
"""

from collections import Counter
from dataclasses import replace
from functools import cached_property

from baton.launcher.config import RunConfig
from baton.launcher.planner.operations import Operations
from baton.launcher.planner.parameters import DTYPE_BYTES, StageParameters
from baton.launcher.planner.parts import Memory
from baton.models.config import SubBlocks, places
from baton.models.settings.cost_model import MixerCosts, RecurrenceFlops
from baton.models.stages import ATTENTION_PASSES, RECURRENCE_PASSES, Stage, partition_layers, single_stage
from baton.training.config import TrainingConfig


class Arithmetic(StageParameters):
    """Memory and work of one stage of a run. Raises ConfigError if a mixer's costs are unknown.

    stage: from models.stages.partition_layers; None: the run's only stage.
    """

    def __init__(self, config: RunConfig, stage: Stage | None = None) -> None:
        super().__init__(config, stage or single_stage(config.model))
        self.micro_batches = self.training.sequences_per_step // (self.layout.data * self.training.micro_batch_size)
        self.passes = self.micro_batches * self.training.segments
        """Segments of micro-batches that are run with a graph."""
        self.together = self.training.gradient_segments
        """Segments that a gradient goes through: all but the last are first run without a graph, surveyed."""
        self.surveys = self.passes // self.together * (self.together - 1)
        self.round = self.passes if self.together == 1 else self.together
        """Passes from one time that the stages fill and empty to the next."""
        self.in_flight = min(self.stage.count - self.stage.index, self.passes) if self.together == 1 else 1
        """Passes whose activations are kept at once: one forward, one backward (1F1B), or one at a time."""

    # ---------------------------------------------------------------------------------------------------------------- memory

    def layer_bytes(self, layer: SubBlocks) -> int:
        """Bytes that autograd saves for a layer."""
        return sum(block.saved_bytes(self.work) for block in self.of_layer(layer))

    @cached_property
    def around_layers(self) -> int:
        """What is kept besides: which tokens are another tensor rank's, and numbers of d_model: the last residual stream; on the
        last stage the gradient of what the norm makes of it, which the loss has made, in the compute type, and what that norm
        keeps (see behind_norm and saved_by_norm): on a GPU its result instead of the stream, elsewhere also the normalised."""
        work, stage = self.work, self.stage
        integers = 8 + 1 if self.tensor > 1 and stage.first else 0
        compute = work.itemsize("compute") * self.model.d_model
        if not stage.last:
            return work.tokens * integers + self.hidden_bytes
        norm = (compute if work.gpu else 2 * 4 * self.model.d_model) * work.stream_tokens
        return work.tokens * (integers + compute) + norm

    def activations(self, *, full_recompute: bool) -> int:
        """Bytes that the forward pass saves. full_recompute: only each layer's input, and scores that are not recomputed."""
        if not full_recompute:
            return self.around_layers + sum(n * self.layer_bytes(layer) for layer, n in self.alike.items())
        # what arrived from the rank before is kept with the graph
        return self.around_layers + len(self.layers) * self.hidden_bytes + self.entering + self._decided

    @cached_property
    def _kept_states(self) -> int:
        """Bytes of what a GPU keeps, in all layers, that it would compute again otherwise."""
        computed_again = replace(self.work, keeps_states=False)
        return sum(n * (b.saved_bytes(self.work) - b.saved_bytes(computed_again)) for b, n in self.block_counts)

    @cached_property
    def entering(self) -> int:
        """Bytes of the States that enter a pass from another rank or segment."""
        return sum(n * block.initial_state_bytes(self.work) for block, n in self.block_counts)

    @cached_property
    def _decided(self) -> int:
        return sum(n * block.score_bytes(self.work) for block, n in self.block_counts)

    @property
    def borders(self) -> int:
        """What is kept of the segments that were surveyed. The first of a sequence, which on one rank is among them, is entered by
        nothing but what its lane carries."""
        surveyed = self.together - 1
        if not surveyed:
            return 0
        first = self.entering if self.layout.context > 1 else self._carried
        keys = self.earlier_keys - (self.offloaded if self.work.gpu else 0)
        return first + (surveyed - 1) * self.entering + surveyed * self._decided + keys

    @cached_property
    def _keys(self) -> int:
        """Bytes of a segment's keys and values of full attention, in all layers."""
        return sum(n * block.key_bytes(self.work) for block, n in self.block_counts)

    @property
    def earlier_keys(self) -> int:
        """Bytes of the keys and values of all segments but the last, and of what later segments add to their gradients in
        float32."""
        return (self.together - 1) * self._keys * (1 + 4 // self.work.compute_bytes)

    @property
    def offloaded(self) -> int:
        """Bytes of them that are in the host's memory; without a GPU that is a rank's memory."""
        return self.earlier_keys if self.training.offload_kv is True else 0

    @property
    def fetched(self) -> int:
        """Bytes that are copied from the host to the GPU per optimizer step, while nothing else runs (`parallel.earlier_keys`).

        Keys of the segments before one are copied for its pass without a graph, for each with one, and backwards. Sums of gradients
        are copied for each that is added behind the first, and once to be added to their segment's own. What goes to the host
        overlaps with what runs or comes.
        """
        if not self.offloaded or not self.work.gpu:
            return 0
        n, passes = self.together, 2 + (self.training.recompute == "full")
        before, surveyed = n * (n - 1) // 2, (n - 1) * (n - 2) // 2
        sums = (surveyed + n - 1) * 4 // self.work.compute_bytes
        return self.micro_batches * self._keys * (surveyed + passes * before + sums)

    @property
    def _carried(self) -> int:
        """Bytes of the States that a micro-batch's lanes carry into it."""
        return self.states * self.training.carries_lane_states

    @property
    def fixed(self) -> int:
        """What recorded passes of segments have in fixed memory beside `borders`: the gradient of a State, and what enters a
        segment; of segments that are surveyed it is copied there, with their scores."""
        if self.training.cuda_graphs is not True or self.training.bptt is None:
            return 0
        return self.entering + (self.entering + self._decided if self.together > 1 else self._carried)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the residual stream of a pass, or of its gradient, which stages send; with sequence parallelism, of this rank's
        part."""
        return DTYPE_BYTES[self.training.residual_dtype] * self.model.d_model * self.work.stream_tokens

    @property
    def _expected(self) -> int:
        """Messages of other stages that have memory: the one being read, which forwards is the first layer's input and counted
        there, and the next one."""
        return self.hidden_bytes * (int(not self.stage.first) + 2 * int(not self.stage.last))

    def of_layer(self, layer: SubBlocks) -> list[MixerCosts]:
        """The mixers of a layer, with the norms of its sub-blocks."""
        return [self.blocks[place] for place in places(layer)]

    @cached_property
    def block_counts(self) -> list[tuple[MixerCosts, int]]:
        """The mixers of all layers, with the norms; those that are alike once, with their number."""
        counts = Counter(place for layer, n in self.alike.items() for place in places(layer) * n)
        return [(self.blocks[place], n) for place, n in counts.items()]

    @cached_property
    def states(self) -> int:
        """Bytes of the final States of a pass."""
        return sum(n * block.final_state_bytes(self.work) for block, n in self.block_counts)

    @property
    def lanes(self) -> int:
        """Bytes of the States that a data rank's lanes carry from step to step, on the first context rank."""
        if not self.training.carries_lane_states:
            return 0
        return self.training.lane_count // self.layout.data * self.states // self.work.batch

    @property
    def before(self) -> int:
        """Bytes of the backup of lane States that a step overwrites, until the next step."""
        return self.micro_batches * self.states if self.training.carries_lane_states else 0

    @property
    def saved(self) -> int:
        """Bytes that a rank writes to a checkpoint: master copies and moments of its partition, and its lanes' States. Of ranks
        with the same data only one writes; this is that rank."""
        return self._saved_by(0, 0)

    def _saved_by(self, data: int, context: int) -> int:
        """By a data and a context rank: without ZeRO the first ones write what all have, and the first context rank has lanes."""
        writes = self.layout.zero or not (data or context)
        return ((4 + self._moments_bytes) * self._part if writes else 0) + (0 if context else self.lanes)

    @property
    def _moments_bytes(self) -> int:
        """Of AdamW's two moments of a parameter."""
        return 2 * DTYPE_BYTES[self.training.optimizer.moments_dtype]

    @property
    def host_bytes(self) -> int:
        """Host memory that a rank keeps from its first save on: a copy of what it writes, so that training goes on meanwhile. Of
        ranks of which only one writes, it is that one's."""
        return self.host_bytes_of(0, 0)

    def host_bytes_of(self, data: int, context: int) -> int:
        """Those of a data and a context rank. Page-locked it takes a power of two, as torch's allocator of such memory rounds."""
        saved = self._saved_by(data, context)
        return 1 << (saved - 1).bit_length() if saved and self.work.gpu else saved

    def memory(self) -> Memory:
        """Memory of one rank."""
        work, full_recompute = self.work, self.training.recompute == "full"
        low = work.compute_bytes == 2
        loss = waiting = 0
        if self.stage.last:
            # logits, on a CPU in both types; a chunk's gradient of the head, and the sum over chunks; that of the hidden vectors. A
            # tied head's gradient waits for the embedding's
            logits = work.compute_bytes if work.gpu else 4 + 2 * low
            loss = min(self.model.loss_chunk, work.tokens) * self.model.padded_vocab_size // self.tensor * logits
            loss += self.head_count * (work.compute_bytes + 4) + work.compute_bytes * self.model.d_model * work.tokens
            waiting = 4 * self.head_count if self.model.tie_embeddings and self.stage.first else 0
        # the gradients of what a sub-block kept are about as large as it
        in_hand = max(block.saved_bytes(work) + block.mask_bytes(work) for block in self.blocks.values())
        # all ranks' keys and values, and their gradients: of the piece that is attended with, and the sum
        keys = max(b.key_bytes(work) for b in self.blocks.values())
        in_hand += 3 * self.together * self.layout.context * keys * work.segment
        if self.offloaded:  # a segment's gradients in float32, of which one half comes while the other leaves
            in_hand += keys * 4 // work.compute_bytes
        if full_recompute:
            in_hand += max(self.layer_bytes(layer) for layer in set(self.layers))
        activations = self.in_flight * self.activations(full_recompute=full_recompute) + self._expected
        borders = self.borders + self.fixed
        return Memory(
            parameters=4 * self._held,
            compute_copies=2 * self._copied if low else 0,
            gradients=4 * self._held,
            optimizer=self._moments_bytes * self._part,
            # as they came, and positions once more in int32
            tokens=(3 * 8 + 4) * work.tokens * self.passes,
            lanes=self.lanes,
            before=self.before,
            saved=0 if work.gpu else self.saved,
            activations=activations,
            borders=borders,
            inputs=0 if self.stage.first else (self.together - 1) * self.hidden_bytes,
            in_hand=in_hand + waiting,
            recorded=activations + borders + max(in_hand + waiting, loss) if self.training.cuda_graphs is True else 0,
            states=self.states if work.segment else 0,
            loss=loss,
            # on a CPU a rank's part of the gradients is made one tensor
            buffers=4 * max(self._bucket, 0 if work.gpu or not self.layout.zero else self._part),
        )

    # ------------------------------------------------------------------------------------------------------------------ work

    def operations(self) -> Operations:
        """Of one rank per optimizer step, surveys left out.

        A matmul runs once forwards and twice backwards; a recurrence's chunks run again in backward as well; attention's scores are
        computed twice there.
        Memory: what forward keeps is written, read by what follows and read again in backward, and its gradient is written and
        read, but for states between chunks, which are part of a recurrence's work; of parameters the compute copy is read three
        times and a gradient made and added.
        """
        work, again = self.work, int(self.training.recompute == "full")
        tokens = work.tokens * self.passes
        matmuls = 2 * ((3 + again) * self._matmuls(head=False) + 3 * self._matmuls(head=True))
        found = self._recurrences
        kept = (self.activations(full_recompute=False) - self._kept_states) * (5 + 2 * again)
        weights = self._multiplied * (3 * work.compute_bytes + (12 if work.compute_bytes == 2 else 8))
        summed = 20 if self._bucket else 4  # gradients: read for their norm; before, copied to a bucket and back
        # weights in the compute dtype: written by the update, or read and written behind the exchange over data ranks
        cast = 2 if work.gpu and not self._bucket else 6
        update = (
            summed * self.local_count
            + (12 + 2 * self._moments_bytes) * self._part
            + (cast * self._copied if work.compute_bytes == 2 else 0)
        )
        return Operations(
            matrix=tokens * (matmuls + (RECURRENCE_PASSES + again) * found.matrix),
            attention=tokens * (ATTENTION_PASSES + again) * found.attention,
            vector=tokens * (RECURRENCE_PASSES + again) * found.vector,
            memory=self.passes * (kept + weights),
            update=update,
        )

    def surveying(self) -> Operations:
        """Of one rank per optimizer step: the layers of the surveyed segments, once forwards, without head and loss."""
        tokens, found = self.work.tokens * self.surveys, self._recurrences
        kept = self.activations(full_recompute=False) - self._kept_states
        return Operations(
            matrix=tokens * (2 * self._matmuls(head=False) + found.matrix),
            attention=tokens * found.attention,
            vector=tokens * found.vector,
            # as in a forward pass, what a layer makes is written and read
            memory=self.surveys * (2 * kept + self._multiplied * self.work.compute_bytes),
        )

    def _matmuls(self, *, head: bool) -> int:
        """Number of this rank's parameters in matmuls per token, of the head or of the layers."""
        names = "embedding.weight", "head.weight"
        return sum(n * p.uses * p.local_numel(self.tensor) for p, n in self.parameter_counts if (p.name in names) is head)

    @cached_property
    def _recurrence_flops(self) -> RecurrenceFlops:
        """Of the stage's sub-blocks over all tensor ranks, per token and forward pass."""
        each = [(block.recurrence_flops(self.training.sequence_length), n) for block, n in self.block_counts]
        return RecurrenceFlops(*(sum(n * flops[kind] for flops, n in each) for kind in range(3)))

    @property
    def _recurrences(self) -> RecurrenceFlops:
        """Of this rank's sub-blocks per token and forward pass."""
        return RecurrenceFlops(*(flops / self.tensor for flops in self._recurrence_flops))

    def useful_flops(self) -> float:
        """Model FLOPs per token of the stage over all tensor ranks: matmuls and recurrences, once forward and twice backward."""
        return 3 * (2.0 * sum(n * p.uses * p.numel for p, n in self.parameter_counts) + sum(self._recurrence_flops))


def of_stages(config: RunConfig) -> tuple[Arithmetic, ...]:
    """Memory and work of every stage in order. Raises ConfigError if a mixer's costs are unknown, LayoutError if there are too few
    layers."""
    stages = partition_layers(config.model, config.layout.pipeline, config.training.sequence_length)
    return tuple(Arithmetic(config, stage) for stage in stages)


def by_recomputation(config: RunConfig, stage: int) -> dict[bool, int]:
    """Bytes of the activations of a stage's pass, by whether everything is recomputed: if not, as configured, or nothing where the
    run recomputes all."""
    training = config.training
    if training.recompute == "full":
        config = config.model_copy(update={"training": training.model_copy(update={"recompute": "none"})})
    one = of_stages(config)[stage]
    return {full: one.activations(full_recompute=full) for full in (False, True)}


def flops_per_token(config: RunConfig, training: TrainingConfig) -> float:
    """Model FLOPs per token of the whole model, see Arithmetic.useful_flops."""
    return sum(one.useful_flops() for one in of_stages(config.model_copy(update={"training": training})))
