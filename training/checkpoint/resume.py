"""Where a run begins: at its newest whole checkpoint, or with initial weights from a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from baton.parallel.cast_weights import drop_cast_weights
from baton.parallel.mesh import Mesh
from baton.training.bptt.lane_states import LANE_STATE_PREFIX, LaneStates
from baton.training.build import TrainState
from baton.training.checkpoint.manifest import Manifest, versions
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore
from baton.training.checkpoint.tools import MASTER, load_weights, names_in
from baton.training.config import InitialWeightsConfig
from baton.training.errors import CheckpointError
from baton.training.run import RunProgress, RunSettings


def open_store(settings: RunSettings, mesh: Mesh) -> CheckpointStore:
    """The store of the run's checkpoints."""
    kept = settings.training.checkpoint
    return CheckpointStore(
        settings.folder / "checkpoints",
        mesh,
        kept.keep_last,
        keep_every=kept.keep_every,
        keep_best=kept.keep_best,
        async_save=kept.async_save,
    )


def load_initial_weights(train_state: TrainState, weights: str | InitialWeightsConfig) -> None:
    """Load the model's weights from a safetensors file. Collective.

    Raises CheckpointError for a file that cannot be read, that has a tensor which the model does not have or has in another shape,
    or that does not have one of the model's, unless these may be missing.
    """
    chosen = InitialWeightsConfig(file=weights) if isinstance(weights, str) else weights
    path = Path(chosen.file)
    boxes = optimizer_boxes(train_state.model, train_state.engine, train_state.mesh, for_save=False)
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {key.removeprefix(MASTER) for key in boxes if key.startswith(MASTER)})
    model, there = set().union(*of_ranks), names_in(path)
    if unknown := sorted(there - model):
        raise CheckpointError(f"{path}: the model has no {unknown[0]} ({len(unknown)} such tensors); it is of another model")
    new = sorted(model - there)
    if new and chosen.missing == "refuse":
        raise CheckpointError(
            f"{path}: it has no tensor {new[0]} ({len(new)} are missing); it is of another model, or set "
            f"training.initial_weights={{file: ..., missing: initialise}}"
        )
    load_weights(path, {key: box for key, box in boxes.items() if key.removeprefix(MASTER) in there})
    train_state.engine.masters_changed()
    drop_cast_weights(train_state.model)
    if train_state.mesh.is_main:
        print(f"beginning with the weights of {path}", flush=True)
        for name in new:
            print(f"not in it, and initialised: {name}", flush=True)


def resume(
    train_state: TrainState,
    lanes: LaneStates | None,
    store: CheckpointStore,
    fingerprints: dict[str, str],
    cursor: Callable[[dict[str, Any]], Any],
    adopt: Callable[[Manifest], None] = lambda manifest: None,
) -> RunProgress:
    """Load the newest whole checkpoint into the engine and the lanes; without one, returns the progress of a new run.

    Args:
        fingerprints: of this run; the checkpoint's must be equal. Raises CheckpointError if they are not.
        cursor: makes a lane's cursor from JSON.
        adopt: takes further state from the manifest, before fingerprints are compared.
    """

    def accept(manifest: Manifest) -> None:
        if manifest.fingerprints.get("model") == fingerprints.get("model"):
            adopt(manifest)
        for what, ours in fingerprints.items():
            if manifest.fingerprints.get(what) != ours:
                raise CheckpointError(
                    f"{store.folder}: the checkpoint of step {manifest.step} was made with another {what} (settings, tokenizer or "
                    f"data differ); use the run's own configuration, or another run directory"
                )

    found = store.load_newest(accept)
    if found is None:
        return RunProgress(0, 0, {})
    path, manifest = found
    boxes = optimizer_boxes(train_state.model, train_state.engine, train_state.mesh, for_save=False)
    if lanes is not None:
        if any(key.startswith(LANE_STATE_PREFIX) for key in manifest.tensors):
            boxes |= lanes.boxes(for_save=False)
        else:  # a fork that begins its data anew
            lanes.clear()
    store.read(path, boxes)
    train_state.engine.updates = manifest.adam_steps
    train_state.engine.masters_changed()
    drop_cast_weights(train_state.model)
    mesh = train_state.mesh
    cursors = {lane: at for lane, at in manifest.cursors_of(cursor).items() if lane % mesh.layout.data == mesh.data_rank}
    if mesh.is_main:
        print(f"resuming from {path.name} ({manifest.tokens:,} tokens)", flush=True)
        changed = [
            f"{name} {manifest.versions[name]} -> {v}" for name, v in versions().items() if manifest.versions.get(name, v) != v
        ]
        if changed:
            print(f"since {path.name}: {', '.join(changed)}; what is computed is the same but for its last bits", flush=True)
    return RunProgress(manifest.step, manifest.tokens, cursors, recent=manifest.recent)
