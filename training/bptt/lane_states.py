"""The States that lanes carry from one optimizer step to the next, for truncated backpropagation through time.

A lane is one of the run's endless streams of documents. Its State is held by the rank whose span begins the sequence
(context rank 0), and on each pipeline stage only for that stage's layers. In a checkpoint it is stored under the lane's
number, so a run with another layout can load it.
"""

import dataclasses
from collections.abc import Sequence

import torch

from baton.kernels.protocol import State, StateSpec, zeros
from baton.models.lm import LanguageModel, States
from baton.parallel.mesh import Mesh
from baton.training.checkpoint.shard_boxes import ShardBox
from baton.training.config import TrainingConfig

LANE_STATE_PREFIX = "carried."
"""What the keys of lanes' States in a checkpoint begin with."""


class LaneStates:
    """The States of this data rank's lanes; zeros for a lane that has not been advanced, whose first token begins a document.

    Memory: (lane_count / data ranks) times the State of one sequence for this rank's layers, on context rank 0 only.
    """

    def __init__(self, model: LanguageModel, training: TrainingConfig, mesh: Mesh) -> None:
        self._mesh, self._count = mesh, training.lane_count
        self._whole = model.state_specs
        self.state_specs = {number: tuple(_local(leaf, mesh) for leaf in leaves) for number, leaves in self._whole.items()}
        lanes = range(mesh.data_rank, self._count, mesh.layout.data)
        self._rows = {lane: row for row, lane in enumerate(lanes)} if mesh.context_rank == 0 else {}
        self._states = {number: zeros(leaves, len(self._rows), mesh.device) for number, leaves in self.state_specs.items()}
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._backup: dict[tuple[int, ...], tuple[torch.Tensor, States]] | None = None

    def read(self, lanes: Sequence[int]) -> States:
        """Copies of the States with which the next tokens of these lanes begin, {layer: {name: [lanes, ...]}}."""
        rows = self._index(lanes)
        return {number: {name: x[rows] for name, x in state.items()} for number, state in self._states.items()}

    def read_into(self, into: States, lanes: Sequence[int]) -> None:
        """`read` into tensors that are there."""
        rows = self._index(lanes)
        for number, state in self._states.items():
            for name, x in state.items():
                torch.index_select(x, 0, rows, out=into[number][name])

    def write(self, lanes: Sequence[int], states: States) -> None:
        """Store the States with which the lanes' tokens ended."""
        rows = self._index(lanes)
        if self._backup is not None and tuple(lanes) not in self._backup:  # every group of segments writes; the first counts
            self._backup[tuple(lanes)] = rows, self.read(lanes)
        for number, state in self._states.items():
            for name, x in state.items():
                x[rows] = states[number][name].detach()

    def begin_step(self) -> None:
        """Begin a step: States overwritten from here on are backed up, so that `restore` can bring them back. Memory:
        `backup_bytes`."""
        self._backup = {}

    def restore(self) -> None:
        """Restore the States as of `begin_step`."""
        for rows, states in (self._backup or {}).values():
            for number, state in self._states.items():
                for name, x in state.items():
                    x[rows] = states[number][name]
        self._backup = {}

    def zero_touched(self) -> None:
        """Zero the States of all lanes that were written since `begin_step`."""
        for rows, _ in (self._backup or {}).values():
            for state in self._states.values():
                for x in state.values():
                    x[rows] = torch.zeros_like(x[rows])
        self._backup = {}

    def clear(self) -> None:
        """Zero the States of all lanes."""
        for state in self._states.values():
            for x in state.values():
                x.zero_()
        self._backup = None

    @property
    def backup_bytes(self) -> int:
        """Bytes of the backed-up States."""
        return sum(x.nbytes for _, states in (self._backup or {}).values() for state in states.values() for x in state.values())

    @property
    def message_specs(self) -> tuple[StateSpec, ...]:
        """Specs of all layers' States in one message, named "<layer>.<name>" as by `to_message`."""
        return tuple(
            dataclasses.replace(leaf, name=f"{number}.{leaf.name}")
            for number, leaves in self.state_specs.items()
            for leaf in leaves
        )

    @staticmethod
    def to_message(states: States) -> State:
        """All layers' States as one State with names "<layer>.<name>"."""
        return {f"{number}.{name}": x for number, state in states.items() for name, x in state.items()}

    def from_message(self, message: State) -> States:
        """The inverse of `to_message`."""
        return {
            number: {leaf.name: message[f"{number}.{leaf.name}"] for leaf in leaves} for number, leaves in self.state_specs.items()
        }

    def boxes(self, *, for_save: bool) -> dict[str, list[ShardBox]]:
        """This rank's boxes of the checkpoint tensors "carried.layers.<layer>.<name>", each of shape [lanes, ...].

        for_save: leave out replicated States on tensor ranks other than 0, which would write them a second time.
        """
        found: dict[str, list[ShardBox]] = {}
        for number, leaves in self._whole.items():
            for leaf, local in zip(leaves, self.state_specs[number], strict=True):
                if for_save and leaf.tp is None and self._mesh.tensor_rank:
                    continue
                x = self._states[number][leaf.name]
                offset = [self._mesh.tensor_rank * n if d == leaf.tp else 0 for d, n in enumerate(local.shape)]
                found[f"{LANE_STATE_PREFIX}layers.{number}.{leaf.name}"] = [
                    ShardBox((self._count, *leaf.shape), (lane, *offset), x[row : row + 1]) for lane, row in self._rows.items()
                ]
        return {key: boxes for key, boxes in found.items() if boxes}

    def _index(self, lanes: Sequence[int]) -> torch.Tensor:
        """Row indices of these lanes on the device, cached: making the tensor anew would synchronize with the GPU."""
        key = tuple(lanes)
        if key not in self._indices:
            self._indices[key] = torch.tensor([self._rows[lane] for lane in key], device=self._mesh.device)
        return self._indices[key]


def _local(leaf: StateSpec, mesh: Mesh) -> StateSpec:
    """The spec of this tensor rank's shard."""
    shape = tuple(n // mesh.layout.tensor if d == leaf.tp else n for d, n in enumerate(leaf.shape))
    return dataclasses.replace(leaf, shape=shape)
