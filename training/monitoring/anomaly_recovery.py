"""What a run does about an anomalous step: stop, skip its update, or roll back without the documents that caused it.

Documents belong to lanes, and lanes to the ranks that read them, so each reading rank identifies its own documents. Those
to be left out are written into the lanes' cursors, which move with the lanes to any layout, and before that into the event log: a
run that is killed before its next checkpoint goes on from an earlier one, whose cursors do not have them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist

from baton.data_pipeline.errors import DataError, StorageError, error_reason, is_transient
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.steps import DocumentRef, StepStream
from baton.parallel.mesh import Mesh
from baton.training.config import TrainingConfig
from baton.training.errors import RunError
from baton.training.monitoring.event_log import EventLog
from baton.training.step.batch_distribution import StepBatches
from baton.training.step.executor import StepResult

_SHOWN = 4

_Place = tuple[int, int, int]
"""As in `Cursor.skipped`."""


class AnomalyRecovery:
    """Decides about anomalous steps and counts interventions of this start. Every rank has one and makes the same decisions.

    fingerprints: of the run; the one of "stream" says which documents the places in lanes are.
    """

    def __init__(self, training: TrainingConfig, events: EventLog, mesh: Mesh, fingerprints: Mapping[str, str]) -> None:
        self._config, self._events, self._mesh, self._fingerprints = training.guard, events, mesh, fingerprints
        self._lanes = range(mesh.data_rank, training.lane_count, mesh.layout.data)
        self._count = 0
        # this rank's, by lane, which the checkpoint that the run goes on from need not know
        self._left_out: dict[int, dict[_Place, None]] = {}
        self._leaves_out = False  # whether a rank does

    def remember(self, step: int) -> None:
        """Leave out what earlier starts have decided to, in steps behind `step`, from which this one goes on. Collective. Raises
        StorageError or DataError, on all ranks: the event log cannot be read."""
        known: list[Any] = [self._earlier_places(step) if self._mesh.is_main else None]
        dist.broadcast_object_list(known, src=0)
        if isinstance(known[0], Exception):
            raise known[0]
        self._leave_out(known[0])

    def _earlier_places(self, step: int) -> list[Sequence[int]] | Exception:
        try:
            events = self._events.read()
        except OSError as error:
            kind = StorageError if is_transient(error) else DataError
            return kind(
                f"{self._events.path}: cannot be read ({error_reason(error)}), and has the documents that earlier rollbacks left "
                f"out; make it readable, then start the run again"
            )
        stream = self._fingerprints["stream"]
        rollbacks = [x for x in events if x["kind"] == "rollback" and x["step"] > step and x.get("stream") == stream]
        lists = [event.get("places") for event in rollbacks]
        return [place for places in lists if isinstance(places, list) for place in places if _is_place(place)]

    def without_documents(self, cursors: Mapping[int, Any]) -> dict[int, Any]:
        """A checkpoint's cursors with all documents that are to be left out. cursors: none before the first step."""
        if not self._leaves_out:
            return dict(cursors)
        # if any rank's lanes have cursors, all must have: a checkpoint of step 0 with some of them would have lost the others
        found = dict(cursors) or {lane: Cursor() for lane in self._lanes}
        for lane in found.keys() & self._left_out.keys():
            cursor, places = found[lane], self._left_out[lane]
            found[lane] = replace(cursor, skipped=(*cursor.skipped, *(x for x in places if x not in cursor.skipped)))
        return found

    def _leave_out(self, places: Iterable[Sequence[int]]) -> None:
        for lane, *place in places:
            self._leaves_out = True
            if lane in self._lanes:
                source, unit, document = place
                self._left_out.setdefault(lane, {})[source, unit, document] = None

    def respond(
        self, result: StepResult, step: int, before: Mapping[int, Any], data: StepBatches, stream: StepStream[Any] | None
    ) -> Literal["skip", "rollback"]:
        """Decide about an anomalous step and log the event. Raises RunError, on all ranks, to stop the run.

        Args:
            step: counted from 0.
            before: cursors of this rank's lanes before the step.
            data: the step's batches.
            stream: on a reading rank, else None.
        """
        assert result.anomaly is not None
        found, exact = self._find(result, step, before, data, stream)
        own = [(x.name, (lane, x.source, x.unit, x.document)) for lane, of_lane in found.items() for x in of_lane]
        of_ranks: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(of_ranks, (own, exact))
        exact = any(was_exact for _, was_exact in of_ranks)
        all_found = [one for of_rank, was_exact in of_ranks for one in of_rank if was_exact or not exact]
        if result.nonfinite is not None and result.nonfinite.is_parameter:  # no document has done it
            all_found = []
        names, places = [name for name, _ in all_found], [place for _, place in all_found]
        policy = self._config.policy
        message = f"step {step + 1}: {result.anomaly}{_listed(names)}"
        if policy == "skip" and result.updated:
            policy, message = "stop", f"{message}; the update is made, and cannot be skipped any more"
        elif policy != "stop" and self._count >= self._config.max_interventions:
            policy, message = "stop", f"{message}; this was tried {self._count} times (training.guard.max_interventions)"
        self._count += 1
        of_rollback = {"places": places, "stream": self._fingerprints["stream"]} if policy == "rollback" else {}
        self._events.write(policy, step + 1, reason=result.anomaly, documents=names, count=self._count, **of_rollback)
        if policy == "stop":
            raise RunError(
                f"{message}. The checkpoints are of before; lower training.optimizer.lr, look at these documents, or set "
                f"training.guard.policy to skip or rollback, then start the run again: it resumes from its last checkpoint"
            )
        if policy == "rollback":
            self._leave_out(places)
        if self._mesh.is_main:
            back = f"going back to the last checkpoint{', without these documents' if names else ''}"
            done = "no update is made of this step" if policy == "skip" else back
            print(f"{message}; {done} ({policy} {self._count} of {self._config.max_interventions})", flush=True)
        return policy

    def _find(
        self, result: StepResult, step: int, before: Mapping[int, Any], data: StepBatches, stream: StepStream[Any] | None
    ) -> tuple[dict[int, list[DocumentRef]], bool]:
        """This rank's documents of the step, by lane; and whether they are narrowed down to the one that caused the anomaly."""
        if stream is None or data.reader_batches is None:
            return {}, False
        lanes = [lane for batch in data.reader_batches for lane in batch.lanes]
        of_lanes = {lane: stream.documents_between(lane, before.get(lane), data.cursors[lane], step) for lane in lanes}
        touched = {lane: of_lane for lane, of_lane in of_lanes.items() if of_lane}  # none where the stream has no documents
        where = result.nonfinite
        if where is None or where.row < 0 or where.data_rank != self._mesh.data_rank:
            return touched, False
        batch = data.reader_batches[where.micro_batch]
        lane, pos = batch.lanes[where.row], batch.pos[where.row]
        number = int((pos[: where.column + 1] == 0).sum()) - int(pos[0] == 0)
        one = of_lanes[lane][number : number + 1]
        return ({lane: one}, True) if one else (touched, False)


def _is_place(value: Any) -> bool:
    """Whether it is a lane and a `_Place`."""
    return isinstance(value, list) and len(value) == 4 and all(type(n) is int and n >= 0 for n in value)


def _listed(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; from {', '.join(names[:_SHOWN])}{more}"
