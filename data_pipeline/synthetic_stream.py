"""Lanes and evaluation sets of synthetic tasks: numbered examples laid out in rows.

Rows are full of whole examples, so a cursor is one integer: the number of the lane's next example. Training and evaluation use
different random keys: with no seed and no lane does training see the evaluation examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from baton.data_pipeline.errors import DataError, NewerFormatError
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.packing import IGNORE_INDEX, Batch, NumpyBatch
from baton.data_pipeline.steps import StepPlan, StepStream
from baton.data_pipeline.synthetic import VERSION, Examples
from baton.data_pipeline.task_config import TaskConfig

CHUNK_TOKENS = 1 << 18  # tokens made at once: enough to make calls cheap, few enough to bound what is in memory besides the batches


@dataclass(frozen=True)
class ExampleCursor:
    """A place in a lane of a task. example: number of the next example, which is also how many are consumed."""

    example: int = 0

    def to_json(self) -> dict[str, int]:
        """A JSON object of one integer."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "ExampleCursor":
        """The cursor that `to_json` wrote. Raises NewerFormatError for one with more keys, and DataError for anything else."""
        if isinstance(value, dict) and value.keys() > {"example"}:
            raise NewerFormatError(f"a task's cursor has {min(value.keys() - {'example'})}, which this version does not know")
        if not isinstance(value, dict) or set(value) != {"example"} or type(value["example"]) is not int or value["example"] < 0:
            raise DataError(f"not a cursor of a synthetic task: {value!r}; the checkpoint is damaged or of a run on other data")
        return cls(value["example"])


class SyntheticStream(StepStream[ExampleCursor]):
    """The endless steps of one data rank; iterate over it. Every row holds context / length examples of its lane, one after the
    other, each a document with pos from 0.

    config: the task. plan: this rank's rows. seed: of the run. cursors: where lanes begin, as saved after step plan.start_step - 1;
    those of other ranks' lanes are ignored; none: the beginning.

    Raises DataError: a context (of any phase) that whole examples do not fill, missing cursors.
    """

    def __init__(
        self, config: TaskConfig, plan: StepPlan, *, seed: int, cursors: Mapping[int, ExampleCursor] | None = None
    ) -> None:
        plan.check(lambda phase: config.check_sequence_length(phase.sequence_length))
        begin = plan.first_cursors(cursors, ExampleCursor())
        examples = Examples(config)
        following = {lane: cursor.example for lane, cursor in begin.items()}

        def fill(step: int, batches: Sequence[NumpyBatch]) -> dict[int, ExampleCursor]:
            rows = [(batch, row, lane) for batch in batches for row, lane in enumerate(batch.lanes)]
            sequence_length = int(batches[0].tokens.shape[1])
            per_row = sequence_length // config.length
            at_once = max(1, CHUNK_TOKENS // sequence_length)
            for start in range(0, len(rows), at_once):
                piece = rows[start : start + at_once]
                tokens, labels = examples.take((("train", seed, lane), following[lane], per_row) for _, _, lane in piece)
                for number, (batch, row, lane) in enumerate(piece):
                    made = slice(number * per_row, (number + 1) * per_row)
                    batch.tokens[row], batch.labels[row] = tokens[made].ravel(), labels[made].ravel()
                    batch.pos[row] = np.tile(np.arange(config.length), per_row)
                    following[lane] += per_row
            return {lane: ExampleCursor(example) for lane, example in following.items()}

        super().__init__(plan, begin, fill)


def synthetic_fingerprint(config: TaskConfig, *, seed: int, lanes: int) -> str:
    """Hex sha256 of everything that decides the lanes' contents. A resumed run must have the same."""
    return fingerprint(["task", VERSION, config.deciding(), seed, lanes])


@dataclass(frozen=True)
class SyntheticEvaluationSet:
    """The examples of one evaluation case. batches: this rank's; labels: number of scored labels over all ranks."""

    batches: list[NumpyBatch]
    labels: int


def synthetic_evaluation_set(
    config: TaskConfig,
    *,
    tokens: int,
    sequence_length: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    examples: int | None = None,
) -> SyntheticEvaluationSet:
    """The first `examples` examples of a task's evaluation stream, or the first tokens / length (at least one), an example a row;
    every run, seed and layout has the same ones. Batches have about as many tokens as those of training, micro_batch_size *
    sequence_length; rows without labels complete the last round of batches over the ranks. Raises DataError: an impossible size."""
    if min(tokens, sequence_length, micro_batch_size, data_size, examples or 1) < 1 or not 0 <= data_rank < data_size:
        raise DataError(
            "tokens, examples, sequence_length, micro_batch_size and data_size must be at least 1, and data_rank one of the data "
            "ranks"
        )
    count, rows = examples or max(1, tokens // config.length), max(1, micro_batch_size * sequence_length // config.length)
    source, pos = Examples(config), np.arange(config.length, dtype=np.int32)
    batches: list[NumpyBatch] = []
    rounds = -(-count // (rows * data_size))
    for number in range(rounds):
        first = (number * data_size + data_rank) * rows
        made, labels = source.take([(("evaluation",), first, rows)])
        labels[max(0, count - first) :] = IGNORE_INDEX
        batches.append(Batch(made, labels, np.broadcast_to(pos, made.shape), ()))
    return SyntheticEvaluationSet(batches, _labels(source, config, count))


def _labels(source: Examples, config: TaskConfig, count: int) -> int:
    """Number of labels of the first `count` examples of the evaluation stream. Where they have different numbers, all are made."""
    if source.asked is not None:
        return count * source.asked
    at_once, found = max(1, CHUNK_TOKENS // config.length), 0
    for first in range(0, count, at_once):
        _, labels = source.take([(("evaluation",), first, min(at_once, count - first))])
        found += int((labels != IGNORE_INDEX).sum())
    return found
