"""Counts the parameters of one rank of a pipeline stage from a run's settings. Torch-free."""

from collections import Counter
from dataclasses import replace
from functools import cached_property

from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.models.config import SubBlocks, places
from baton.models.settings.cost_model import MixerCosts, Workload
from baton.models.settings.declarations import ParameterDeclaration
from baton.models.settings.sub_block_costs import behind_norm, beside
from baton.models.stages import Stage

REDUCE_BUCKET = 500_000_000
"""Numbers in a bucket of the gradients' all-reduce: reduce_bucket_size in parallel.zero, which imports torch. A test compares."""


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class StageParameters:
    """A stage's layers with their costs, and its parameters. Raises ConfigError if a mixer's costs are unknown."""

    def __init__(self, config: RunConfig, stage: Stage) -> None:
        if config.model.vocab_size is None:
            raise ConfigError("model.vocab_size is not known: it comes from the tokenizer; set model.vocab_size=N")
        assert stage.count == config.layout.pipeline
        self.model, self.training, self.layout, self.stage = config.model, config.training, config.layout, stage
        every_layer = config.model.sub_blocks
        self.layers = tuple(every_layer[n] for n in stage.layers)
        self.alike = Counter(self.layers)  # how many layers have the same sub-blocks
        self.tensor, self.shards = self.layout.tensor, self.layout.data * self.layout.context
        self.work = Workload(
            batch=self.training.micro_batch_size,
            length=self.training.segment // self.layout.context,
            tensor=self.tensor,
            compute_bytes=DTYPE_BYTES[config.compute_dtype],
            gpu=config.device != "cpu",
            segment=self.layout.context > 1 or self.training.bptt is not None,
            rerun=self.layout.uses_transitions(self.training.gradient_segments),
            sequence_parallel=self.layout.sequence_parallel and self.tensor > 1,
            selective=self.training.recompute == "selective",
            keeps_states=self.training.recompute == "none",
            context=self.layout.context,
        )
        self.blocks: dict[tuple[str, bool], MixerCosts] = {}  # by name, and whether it has its sub-block's norm
        for name, first in dict.fromkeys(place for layer in self.layers for place in places(layer)):
            self.blocks[name, first] = self._costs(name, first)

    def _costs(self, name: str, first: bool) -> MixerCosts:
        try:
            costs = self.model.mixers[name].costs(self.model.d_model)
        except ValueError as error:
            raise ConfigError(f"model.mixers.{name}: {error}") from None
        return (behind_norm if first else beside)(costs, self.model.d_model)

    @cached_property
    def parameters(self) -> tuple[ParameterDeclaration, ...]:
        """The stage's parameters, with their names in the model."""
        before, behind = self._outside
        found = [*before, *(self._shared if self.stage.first else ())]
        for number, layer in zip(self.stage.layers, self.layers, strict=True):
            for name, first in self._own(layer):
                place = self.model.place(number, name)
                found += [replace(p, name=f"{place}.{p.name}") for p in self.blocks[name, first].parameters]
        return self._partial(*found, *behind)

    def _partial(self, *parameters: ParameterDeclaration) -> tuple[ParameterDeclaration, ...]:
        """What reads a part of the tokens, or what every rank computes alike, gets a part of its gradient."""
        partial = self.work.sequence_parallel
        return tuple(replace(p, partial=True) if partial and p.split is None else p for p in parameters)

    def _own(self, layer: SubBlocks) -> list[tuple[str, bool]]:
        """The places of a layer whose parameters no other layer uses."""
        return [(name, first) for name, first in places(layer) if name not in self.model.shared]

    @cached_property
    def _shared(self) -> list[ParameterDeclaration]:
        """Those of the blocks that layers share; `uses` counts the matmuls of all of this stage's layers."""
        found = []
        for name, first in self.model.shared_blocks.items():
            layers = sum(n for layer, n in self.alike.items() if (name, first) in places(layer))
            parameters = self._costs(name, first).parameters
            found += [replace(p, name=f"shared.{name}.{p.name}", uses=layers * p.uses) for p in parameters]
        return found

    @cached_property
    def _outside(self) -> tuple[list[ParameterDeclaration], list[ParameterDeclaration]]:
        """Those before and those behind the layers."""
        # an embedding that is no head here is only looked up, so no matmul reads it
        before = [self._embedding(uses=int(self.model.tie_embeddings and self.stage.last))] if self.stage.first else []
        behind = [p for p in (self.model.final_norm, self.model.head) if p is not None] if self.stage.last else []
        return before, behind

    @cached_property
    def _unnamed(self) -> list[tuple[ParameterDeclaration, int]]:
        """The same without the layers' names: a deep model has thousands."""
        found = [(p, 1) for part in (*self._outside, self._shared if self.stage.first else ()) for p in part]
        own = [(self.blocks[place], n) for layer, n in self.alike.items() for place in self._own(layer)]
        return found + [(p, n) for block, n in own for p in block.parameters]

    @cached_property
    def tied_replicas(self) -> tuple[ParameterDeclaration, ...]:
        """Parameters of another stage that this one reads. It holds their values and gradients, but no optimizer state."""
        if self.stage.first:
            return ()
        embedding = [self._embedding(uses=1)] if self.model.tie_embeddings and self.stage.last else []
        return self._partial(*embedding, *self._shared)

    @cached_property
    def parameter_counts(self) -> list[tuple[ParameterDeclaration, int]]:
        """The stage's parameters and those of others that it reads; those of layers that are alike once, with their number."""
        return [*self._unnamed, *((p, 1) for p in self.tied_replicas)]

    def _embedding(self, uses: int) -> ParameterDeclaration:
        return replace(self.model.embedding, uses=uses)

    @cached_property
    def shared_count(self) -> int:
        """Number of this rank's parameters in blocks that layers share, which all stages have."""
        return sum(p.local_numel(self.tensor) for p in self._shared)

    @cached_property
    def parameter_count(self) -> int:
        """Number of the stage's parameters over all tensor ranks."""
        return sum(n * p.numel for p, n in self._unnamed)

    @cached_property
    def local_count(self) -> int:
        """Number of this rank's parameters, which it updates together with the ranks that have other tokens."""
        return sum(n * p.local_numel(self.tensor) for p, n in self._unnamed)

    @cached_property
    def _held(self) -> int:
        return self.local_count + sum(p.local_numel(self.tensor) for p in self.tied_replicas)

    @cached_property
    def _copied(self) -> int:
        return sum(n * p.local_numel(self.tensor) for p, n in self.parameter_counts if p.uses)

    @cached_property
    def _multiplied(self) -> int:
        """As `_copied`, of a block that layers share once for each of them: each reads it again."""
        layers = [(self.blocks[place], n) for layer, n in self.alike.items() for place in places(layer)]
        every = [(p, 1) for part in (*self._outside, self.tied_replicas) for p in part if not p.name.startswith("shared.")]
        every += [(p, n) for block, n in layers for p in block.parameters]
        return sum(n * p.local_numel(self.tensor) for p, n in every if p.uses)

    @property
    def _part(self) -> int:
        """Number of parameters whose optimizer state this rank holds, without ZeRO's padding, which is small."""
        return self.local_count if self.layout.zero == 0 else -(-self.local_count // self.shards)

    @property
    def _bucket(self) -> int:
        """Number of gradients in the flat copy that ranks sum; one rank sums nothing, but for ZeRO-2."""
        return 0 if self.shards == 1 and self.layout.zero < 2 else min(self.local_count, REDUCE_BUCKET)

    @property
    def head_count(self) -> int:
        """Number of the head's parameters on this rank."""
        return self.model.padded_vocab_size * self.model.d_model // self.tensor
