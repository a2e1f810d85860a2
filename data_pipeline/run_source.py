"""What a run reads, whatever its kind, in the one shape that the training loop drives.

The one thing to know: both sources have the same attributes, and the loop asks for the class only where there is something that the
other kind has not: a tokenizer's text, or a task's accuracy.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from baton.data_pipeline.config import ShardsConfig, TaskConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.reader import Corpus, Growth
from baton.data_pipeline.remote import Cache
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.stream import BatchStream
from baton.data_pipeline.synthetic_stream import ExampleCursor, TaskStream, task_fingerprint
from baton.data_pipeline.tokenizer import Tokenizer


class ShardSource:
    """Text from shards. Raises DataError: no dataset or tokenizer in its place, sources that hold out different documents.

    Attributes: `datasets`, by the name of their source; `weights`, of each for evaluation.
    """

    cursor = staticmethod(Cursor.from_json)
    beginning = Cursor()

    def __init__(self, config: ShardsConfig) -> None:
        self.config = config
        self.tokenizer = Tokenizer(config.tokenizer)
        self.datasets = open_datasets(config)
        self.vocab_size = self.tokenizer.vocab_size
        self.weights = dict(config.schedule[-1][1]) if config.mixture else {"": 1.0}
        self._growth: dict[str, Growth] = {name: ((0, len(d.require("train"))),) for name, d in self.datasets.items()}

    @property
    def heaviest(self) -> Dataset:
        """The source with the greatest weight."""
        return self.datasets[max(self.weights, key=lambda name: self.weights[name])]

    def fingerprint(self, *, seed: int, lanes: int) -> str:
        """Hex sha256 of everything that decides the lanes' contents. A resumed run must find it equal."""
        return self._corpus(seed, lanes).fingerprint(list(self.datasets.values()), self.tokenizer)

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the sources: {name: [[first epoch, shards, their fingerprint], ...]}, JSON-able."""
        return {
            name: [[epoch, count, self.datasets[name].prefix_fingerprint("train", count)] for epoch, count in growth]
            for name, growth in self._growth.items()
        }

    def adopt(self, state: Mapping[str, Any], cursors: Mapping[int, Cursor], *, seed: int, lanes: int) -> None:
        """Go on with the shards of a checkpoint, as `state` said them; those added since are read from the first epoch that no lane
        has begun, if the settings ask for it. cursors: of all lanes. Raises DataError."""
        if set(state) != set(self.datasets):
            raise DataError(
                f"the run reads {_named(state)}, these settings name {_named(self.datasets)}; use the run's own sources"
            )
        for name, recorded in state.items():
            dataset, have = self.datasets[name], len(self.datasets[name].require("train"))
            for _, count, digest in recorded:
                if have < count or dataset.prefix_fingerprint("train", count) != digest:
                    raise DataError(
                        f"{dataset.location.text}: its first {count} shards are not those that the run has read; "
                        f"restore them, or begin another run"
                    )
            self._growth[name] = tuple((epoch, count) for epoch, count, _ in recorded)
            if have > recorded[-1][1] and not self.config.append:
                raise DataError(
                    f"{dataset.location.text} has {have - recorded[-1][1]} shards more than the run has begun with; set "
                    f"data.append=true to read them from the next epoch on, or take them away"
                )
        orders, _ = self._corpus(seed, lanes).orders(list(self.datasets.values()))
        for number, (name, dataset) in enumerate(self.datasets.items()):
            have = len(dataset.require("train"))
            if have > self._growth[name][-1][1]:
                begun = max(orders[number].epoch(lane, cursor.units_of(number)) for lane, cursor in cursors.items())
                self._growth[name] += ((begun + 1, have),)

    def stream(self, plan: StepPlan, *, seed: int, cursors: Mapping[int, Any] | None) -> BatchStream:
        """This rank's steps; cursors: as `BatchStream` takes them. Raises DataError."""
        return BatchStream(
            self.datasets if self.config.sources else self.datasets[""],
            self.tokenizer,
            plan,
            seed=seed,
            cursors=cursors,
            unit_documents=self.config.unit_documents,
            unit_bytes=self.config.unit_bytes,
            mixture=self.config.schedule,
            growth=self._growth,
            workers=self.config.workers,
        )

    def _corpus(self, seed: int, lanes: int) -> Corpus:
        return Corpus(
            names=tuple(self.config.sources),
            split="train",
            seed=seed,
            lanes=lanes,
            unit_documents=self.config.unit_documents,
            unit_bytes=self.config.unit_bytes,
            schedule=self.config.schedule,
            growth=tuple(self._growth.values()),
        )


def open_datasets(config: ShardsConfig) -> dict[str, Dataset]:
    """The datasets by the name of their source. Raises DataError, also when one's held-out documents may be another's training:
    which are held out is a function of a document's text and of the fraction."""
    cache = None if config.cache is None else Cache(config.cache, config.cache_bytes)
    datasets = {name: Dataset.open(place, cache=cache) for name, place in config.places.items()}
    fractions = {name: dataset.settings.get("validation_fraction") for name, dataset in datasets.items()}
    if len(set(fractions.values())) > 1:
        shown = ", ".join(f"{name}: {fraction}" for name, fraction in fractions.items())
        raise DataError(
            f"data.sources hold out different fractions of their documents ({shown}), so one's validation may be another's "
            f"training; prepare them with the same validation fraction"
        )
    return datasets


def _named(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


class TaskSource:
    """A synthetic task."""

    cursor = staticmethod(ExampleCursor.from_json)
    beginning = ExampleCursor()

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size

    def fingerprint(self, *, seed: int, lanes: int) -> str:
        """Hex sha256 of everything that decides the lanes' contents. A resumed run must find it equal."""
        return task_fingerprint(self.config, seed=seed, lanes=lanes)

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the source: nothing, examples have no files."""
        return {}

    def adopt(self, state: Mapping[str, Any], cursors: Mapping[int, Any], *, seed: int, lanes: int) -> None:
        """Go on from a checkpoint: nothing to do."""

    def stream(self, plan: StepPlan, *, seed: int, cursors: Mapping[int, Any] | None) -> TaskStream:
        """This rank's steps; cursors: as `TaskStream` takes them. Raises DataError."""
        return TaskStream(self.config, plan, seed=seed, cursors=cursors)


def open_source(config: ShardsConfig | TaskConfig) -> ShardSource | TaskSource:
    """The source that the settings describe. Raises DataError."""
    return ShardSource(config) if isinstance(config, ShardsConfig) else TaskSource(config)
