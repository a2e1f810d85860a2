"""Rectangles to and from torch.distributed.checkpoint files, without gathering anything.

The library's default planners know whole tensors and DTensors; these know lists of rectangles. Its metadata file is a pickle,
which is why reading goes through an unpickler that can make nothing but the metadata's own classes.
"""

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from baton.training.checkpoint.rectangles import Rectangle
from baton.training.errors import CheckpointError

Rectangles = dict[str, list[Rectangle]]


def _chunk(rectangle: Rectangle) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(rectangle.offset), torch.Size(rectangle.data.shape))


class RectangleSavePlanner(SavePlanner):
    """Writes a dictionary of key -> rectangles; every rank brings its own."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._rectangles: Rectangles = state_dict
        self._by_index: dict[tuple[str, tuple[int, ...]], Tensor] = {
            (key, r.offset): r.data for key, rs in state_dict.items() for r in rs
        }

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(key, torch.Size(r.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(r), properties=TensorProperties(dtype=r.data.dtype), size=torch.Size(r.whole)
                ),
            )
            for key, rectangles in self._rectangles.items()
            for r in rectangles
        ]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        offset = write_item.index.offset
        assert offset is not None
        return self._by_index[write_item.index.fqn, tuple(offset)]


class RectangleLoadPlanner(LoadPlanner):
    """Fills rectangles in place from whatever rectangles were written. Raises CheckpointError where they do not cover them."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._rectangles: Rectangles = state_dict
        self._metadata = metadata
        self._by_index = {(key, r.offset): r.data for key, rs in state_dict.items() for r in rs}

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, rectangles in self._rectangles.items():
            stored = self._metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"the checkpoint has no tensor {key}: it is of another model")
            for r in rectangles:
                if tuple(stored.size) != r.whole:
                    raise CheckpointError(f"the checkpoint's {key} has shape {tuple(stored.size)}, the model's {r.whole}")
                found = create_read_items_for_chunk_list(key, stored, [_chunk(r)])
                covered = sum(item.lengths.numel() for item in found)
                if covered != r.data.numel():
                    raise CheckpointError(f"the checkpoint holds {covered} of {r.data.numel()} elements of {key} at {r.offset}")
                # the helper numbers chunks within its list; the offset says which rectangle is meant
                items += [dataclasses.replace(item, dest_index=MetadataIndex(key, torch.Size(r.offset))) for item in found]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None
        view = self._by_index[read_item.dest_index.fqn, tuple(offset)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: resolve_tensor gave a view of the destination."""


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # the types of what is stored: masters, moments, and the leaves of States
    "torch": {"Size", "strided", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    # the folder the checkpoint was written to, which the library keeps in its metadata; 3.13 moved the class
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"the checkpoint's metadata asks for {module}.{name}, which no checkpoint needs; it is not loaded")


class SafeReader(FileSystemReader):
    """torch's reader, with the metadata read by an allow-list unpickler (tensors are read with weights_only already)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as f:
            metadata = _MetadataUnpickler(f).load()
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise CheckpointError("the checkpoint's metadata is not torch.distributed.checkpoint's")
        metadata.storage_meta.load_id = self.load_id
        return metadata
