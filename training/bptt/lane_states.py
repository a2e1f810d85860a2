"""What every lane carries from one optimizer step to the next: truncated backpropagation through time.

The one thing to know: a lane's State lives where its segments begin, on the first sequence rank, each stage having its own layers'.
It moves with the lane: any layout can load what any other saved.
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
    """States of this data rank's lanes. One that was never advanced has zeros: its first token begins a document, which lets
    nothing in.

    Memory: lane_count / data ranks times a sequence's State of this rank's layers, on the first sequence rank only.
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
        """Copies of what enters the next tokens of these lanes."""
        rows = self._index(lanes)
        return {number: {name: x[rows] for name, x in state.items()} for number, state in self._states.items()}

    def write(self, lanes: Sequence[int], states: States) -> None:
        """Keep what left them."""
        rows = self._index(lanes)
        if self._backup is not None and tuple(lanes) not in self._backup:  # every group of segments writes; the first counts
            self._backup[tuple(lanes)] = rows, self.read(lanes)
        for number, state in self._states.items():
            for name, x in state.items():
                x[rows] = states[number][name].detach()

    def begin_step(self) -> None:
        """A step begins: what is written from here on can be taken back, at the memory of the States of its lanes, once each."""
        self._backup = {}

    def restore(self) -> None:
        """The States are as they were at `begin`."""
        for rows, states in (self._backup or {}).values():
            for number, state in self._states.items():
                for name, x in state.items():
                    x[rows] = states[number][name]
        self._backup = {}

    def zero_touched(self) -> None:
        """The lanes written since `begin` carry nothing, as at the beginning."""
        for rows, _ in (self._backup or {}).values():
            for state in self._states.values():
                for x in state.values():
                    x[rows] = torch.zeros_like(x[rows])
        self._backup = {}

    def clear(self) -> None:
        """All lanes carry nothing, as at the beginning."""
        for state in self._states.values():
            for x in state.values():
                x.zero_()
        self._backup = None

    @property
    def backup_bytes(self) -> int:
        """Of what `take_back` would restore."""
        return sum(x.nbytes for _, states in (self._backup or {}).values() for state in states.values() for x in state.values())

    @property
    def message_specs(self) -> tuple[StateSpec, ...]:
        """All layers' leaves, as `to_message` calls them."""
        return tuple(
            dataclasses.replace(leaf, name=f"{number}.{leaf.name}")
            for number, leaves in self.state_specs.items()
            for leaf in leaves
        )

    @staticmethod
    def to_message(states: States) -> State:
        """All layers' States in one."""
        return {f"{number}.{name}": x for number, state in states.items() for name, x in state.items()}

    def from_message(self, message: State) -> States:
        """What `to_message` was given."""
        return {
            number: {leaf.name: message[f"{number}.{leaf.name}"] for leaf in leaves} for number, leaves in self.state_specs.items()
        }

    def boxes(self, *, for_save: bool) -> dict[str, list[ShardBox]]:
        """Key "carried.layers.<number>.<leaf>", a tensor [lanes, ...], to this rank's part of it. for_save: leave out what tensor
        rank 0 writes too."""
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
        """Rows of these lanes. Kept: where a lane is never changes, and making one anew waits for all that a GPU has to do."""
        key = tuple(lanes)
        if key not in self._indices:
            self._indices[key] = torch.tensor([self._rows[lane] for lane in key], device=self._mesh.device)
        return self._indices[key]


def _local(leaf: StateSpec, mesh: Mesh) -> StateSpec:
    """This tensor rank's part of it."""
    shape = tuple(n // mesh.layout.tensor if d == leaf.tp else n for d, n in enumerate(leaf.shape))
    return dataclasses.replace(leaf, shape=shape)
