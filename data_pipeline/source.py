"""What a run reads, whatever its kind, in the one shape that the training loop drives.

The one thing to know: both sources have the same attributes, and the loop asks for the class only where there is something that the
other kind has not: a tokenizer's text, or a task's accuracy.
"""

from collections.abc import Mapping
from typing import Any

from baton.data_pipeline.config import ShardsConfig, TaskConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.lanes import Cursor
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.stream import BatchStream, stream_fingerprint
from baton.data_pipeline.task_stream import ExampleCursor, TaskStream, task_fingerprint
from baton.data_pipeline.tokenizer import Tokenizer


class ShardSource:
    """Text from shards. Raises DataError: no dataset or tokenizer in its place."""

    cursor = staticmethod(Cursor.from_json)

    def __init__(self, config: ShardsConfig) -> None:
        self.config = config
        self.tokenizer = Tokenizer(config.tokenizer)
        self.dataset = Dataset.open(config.path)
        self.vocab_size = self.tokenizer.vocab_size

    def fingerprint(self, *, seed: int, lanes: int) -> str:
        """Hex sha256 of everything that decides the lanes' contents. A resumed run must find it equal."""
        return stream_fingerprint(
            self.dataset,
            self.tokenizer,
            seed=seed,
            lanes=lanes,
            unit_documents=self.config.unit_documents,
            unit_bytes=self.config.unit_bytes,
        )

    def stream(self, plan: StepPlan, *, seed: int, cursors: Mapping[int, Any] | None) -> BatchStream:
        """This rank's steps; cursors: as `BatchStream` takes them. Raises DataError."""
        return BatchStream(
            self.dataset,
            self.tokenizer,
            plan,
            seed=seed,
            cursors=cursors,
            unit_documents=self.config.unit_documents,
            unit_bytes=self.config.unit_bytes,
        )


class TaskSource:
    """A synthetic task."""

    cursor = staticmethod(ExampleCursor.from_json)

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size

    def fingerprint(self, *, seed: int, lanes: int) -> str:
        """Hex sha256 of everything that decides the lanes' contents. A resumed run must find it equal."""
        return task_fingerprint(self.config, seed=seed, lanes=lanes)

    def stream(self, plan: StepPlan, *, seed: int, cursors: Mapping[int, Any] | None) -> TaskStream:
        """This rank's steps; cursors: as `TaskStream` takes them. Raises DataError."""
        return TaskStream(self.config, plan, seed=seed, cursors=cursors)


def open_source(config: ShardsConfig | TaskConfig) -> ShardSource | TaskSource:
    """The source that the settings describe. Raises DataError."""
    return ShardSource(config) if isinstance(config, ShardsConfig) else TaskSource(config)
