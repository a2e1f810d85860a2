"""The data of a training run: text from shards or a synthetic task, as streams of batches.

`ShardSource` and `TaskSource` have the same attributes and methods. The training loop asks for the class only where one kind has
something that the other lacks: a tokenizer, or a task's accuracy.

A lane holds the short documents of one unit and a chunk of a long one, so its memory does not grow with a document's length.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.reader import CorpusSpec, DocReader, Growth, LaneReader
from baton.data_pipeline.remote import Cache
from baton.data_pipeline.steps import DocumentRef, StepPlan, StepStream
from baton.data_pipeline.synthetic_stream import ExampleCursor, SyntheticStream, synthetic_fingerprint
from baton.data_pipeline.task_config import TaskConfig
from baton.data_pipeline.tokenizer import Losses, Tokenizer, load_tokenizer
from baton.data_pipeline.workers import Start, Workers
from baton.data_pipeline.written_by import known_fields

_LOOKED_AT = 64  # documents of a dataset of text that are tokenized to say what a lossy tokenizer loses


class BatchStream(StepStream[Cursor]):
    """Iterator over the endless steps of one data rank.

    Args:
        sources: a dataset, or several by name.
        tokenizer: makes the ids of a text dataset. It must be the one that made the ids of a token dataset.
        plan: this rank's rows in each step. Everything except `lanes` may change on resuming.
        split: which documents.
        seed: of the order.
        cursors: where lanes begin, as saved after step plan.start_step - 1; cursors of other ranks' lanes are ignored. None: the
            beginning.
        unit_documents, unit_bytes: see ShardsConfig.
        mixture: of several sources, (first step, {name: weight}), see Mixture.
        growth: of each source to which shards were added, by name ("" for a single one).
        workers: number of processes that read; 0: a thread of this process.
        start: see Workers.

    Attributes:
        fingerprint: hex sha256 of everything that decides the lanes' contents. A resumed run must have the same.
        cursors: of this rank's lanes, after the last step yielded.

    Raises:
        DataError: ids of another tokenizer, missing cursors, damaged data. `next` raises errors of the background thread.
    """

    def __init__(
        self,
        sources: Dataset | Mapping[str, Dataset],
        tokenizer: Tokenizer,
        plan: StepPlan,
        *,
        split: str = "train",
        seed: int,
        cursors: Mapping[int, Cursor] | None = None,
        unit_documents: int = ShardsConfig.model_fields["unit_documents"].default,
        unit_bytes: int = ShardsConfig.model_fields["unit_bytes"].default,
        mixture: tuple[tuple[int, Mapping[str, float]], ...] = (),
        growth: Mapping[str, Growth] | None = None,
        workers: int = 0,
        start: Start | None = None,
    ) -> None:
        begin = plan.first_cursors(cursors, Cursor())
        named = {"": sources} if isinstance(sources, Dataset) else dict(sources)
        datasets = list(named.values())
        corpus = CorpusSpec(
            names=tuple(named) if len(named) > 1 else (),
            split=split,
            seed=seed,
            lanes=plan.lanes,
            unit_documents=unit_documents,
            unit_bytes=unit_bytes,
            schedule=mixture,
            growth=tuple((growth or {}).get(name, ()) for name in named),
        )
        self.fingerprint = corpus.fingerprint(datasets, tokenizer)
        # also with workers: it refuses unreadable data at once, and names documents for `documents_between`
        self._documents = DocReader(corpus, datasets, tokenizer)
        if workers:
            fill = Workers(workers, corpus, datasets, tokenizer, plan, begin, start)
            super().__init__(plan, begin, fill, fill.close, fill.room, fill.made)
        else:
            super().__init__(plan, begin, LaneReader(self._documents, begin))

    def documents_between(self, lane: int, before: Cursor | None, after: Cursor, step: int) -> list[DocumentRef]:
        """Documents of which a lane of this rank gave tokens between two cursors of a step, in order. before: None is the lane's
        beginning."""
        return self._documents.documents_between(lane, before or Cursor(), after, step)


class ShardSource:
    """Text from shards.

    Attributes:
        datasets: by the name of their source.
        weights: of each source in evaluation.

    Raises:
        DataError: no dataset or tokenizer at its path, or sources that hold out different fractions.
    """

    cursor = staticmethod(Cursor.from_json)
    beginning = Cursor()

    def __init__(self, config: ShardsConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
        self.datasets = open_datasets(config)
        self.vocab_size = self.tokenizer.vocab_size
        self.weights = dict(config.schedule[-1][1]) if config.mixture else {"": 1.0}
        self._growth: dict[str, Growth] = {name: ((0, len(d.require("train"))),) for name, d in self.datasets.items()}

    @property
    def heaviest(self) -> Dataset:
        """The source with the largest weight."""
        return self.datasets[max(self.weights, key=lambda name: self.weights[name])]

    def remarks(self) -> list[str]:
        """A line about each dataset of which the tokenizer may lose text: what, and at which rate in it (in the first documents,
        if it holds text). Raises DataError."""
        if not self.tokenizer.lossy:
            return []
        lines = []
        for dataset in self.datasets.values():
            if dataset.content == "tokens" and not dataset.losses:
                continue  # ids from elsewhere, whose text is not known
            if dataset.content == "tokens":
                losses = Losses(**known_fields(Losses, dataset.losses))
            else:
                losses = _losses(dataset, self.tokenizer)
            lines.append(f"{dataset.location.text}: {losses.describe(self.tokenizer.lossy)}")
        return lines

    def fingerprint(self, *, seed: int, lanes: int) -> str:
        """Hex sha256 of everything that decides the lanes' contents. A resumed run must have the same."""
        return self._corpus(seed, lanes).fingerprint(list(self.datasets.values()), self.tokenizer)

    def state(self) -> dict[str, Any]:
        """The sources' part of a checkpoint: {name: [[first epoch, shards, their fingerprint], ...]}, JSON-able."""
        return {
            name: [[epoch, count, self.datasets[name].prefix_fingerprint("train", count)] for epoch, count in growth]
            for name, growth in self._growth.items()
        }

    def adopt(self, state: Mapping[str, Any], cursors: Mapping[int, Cursor], *, seed: int, lanes: int) -> None:
        """Continue with the shards of a checkpoint, `state`. Shards added since are read from the first epoch that no lane has
        begun, if the settings allow it. cursors: of all lanes. Raises DataError."""
        if set(state) != set(self.datasets):
            raise DataError(
                f"the run reads {_named(state)}, these settings name {_named(self.datasets)}; use the run's own sources"
            )
        for name, recorded in state.items():
            if not isinstance(recorded, list) or not recorded or not all(map(_is_growth, recorded)):
                raise DataError(
                    f"the checkpoint's shards of source {name!r} are not in a form that this version of Baton knows; use the "
                    f"version that wrote it, or an earlier checkpoint"
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

    def stream(self, plan: StepPlan, *, seed: int, cursors: Mapping[int, Any] | None, cores: int = 0) -> BatchStream:
        """This rank's steps. cursors: see `BatchStream`. cores: see `ShardsConfig.worker_count`. Raises DataError."""
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
            workers=self.config.worker_count(cores),
        )

    def _corpus(self, seed: int, lanes: int) -> CorpusSpec:
        return CorpusSpec(
            names=tuple(self.config.sources),
            split="train",
            seed=seed,
            lanes=lanes,
            unit_documents=self.config.unit_documents,
            unit_bytes=self.config.unit_bytes,
            schedule=self.config.schedule,
            growth=tuple(self._growth.values()),
        )


def _losses(dataset: Dataset, tokenizer: Tokenizer) -> Losses:
    """What the tokenizer loses of the first documents of a dataset of text."""
    found = Losses()
    for _, (_, _, payload) in zip(range(_LOOKED_AT), dataset.samples_short("train")):
        if payload is not None:
            found += Losses.of(tokenizer, payload, tokenizer.encode_utf8(payload), decoded=True)
    return found


def open_datasets(config: ShardsConfig) -> dict[str, Dataset]:
    """The datasets by the name of their source.

    Raises:
        DataError: a dataset cannot be opened, or datasets hold out different fractions. A document is held out by its text and the
            fraction, so one's validation documents could be another's training documents.
    """
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


def _is_growth(value: Any) -> bool:
    """Whether it is what `ShardSource.state` says of an epoch."""
    return isinstance(value, list) and [type(part) for part in value] == [int, int, str]


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
        """Hex sha256 of everything that decides the lanes' contents. A resumed run must have the same."""
        return synthetic_fingerprint(self.config, seed=seed, lanes=lanes)

    def state(self) -> dict[str, Any]:
        """The source's part of a checkpoint: nothing, examples have no files."""
        return {}

    def adopt(self, state: Mapping[str, Any], cursors: Mapping[int, Any], *, seed: int, lanes: int) -> None:
        """Continue from a checkpoint: nothing to do."""

    def stream(self, plan: StepPlan, *, seed: int, cursors: Mapping[int, Any] | None, cores: int = 0) -> SyntheticStream:
        """This rank's steps. cursors: see `SyntheticStream`. cores: not used. Raises DataError."""
        return SyntheticStream(self.config, plan, seed=seed, cursors=cursors)


def open_source(config: ShardsConfig | TaskConfig) -> ShardSource | TaskSource:
    """The source of a run's settings. Raises DataError."""
    return ShardSource(config) if isinstance(config, ShardsConfig) else TaskSource(config)
