"""The format of a file of weights, by its metadata. Torch-free."""

from collections.abc import Mapping
from pathlib import Path

from baton.data_pipeline.written_by import PACKAGE, other_format
from baton.training.errors import OtherFormatError

KIND = "baton-weights-"
FORMAT = f"{KIND}1"


def check_format(path: Path, metadata: Mapping[str, str] | None) -> None:
    """Raises OtherFormatError for weights of Baton's in a format that this version does not read. metadata: of the safetensors
    file, where others say nothing, or something else."""
    found = (metadata or {}).get("format", "")
    if found.startswith(KIND) and found != FORMAT:
        raise OtherFormatError(other_format(path, found, FORMAT, (metadata or {}).get(PACKAGE)))
