"""`load_tokenizer`, the one way to read a tokenizer's file, whichever library made it."""

import os
from pathlib import Path

from baton.data_pipeline.errors import DataError, is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.tokenizer_base import Ids, Losses, Tokenizer

__all__ = ["Ids", "Losses", "Tokenizer", "load_tokenizer"]

_FILES = ("tokenizer.json", "tokenizer.model")


def load_tokenizer(path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
    """A tokenizer from its file: a SentencePiece .model, or a tokenizer.json of Hugging Face's `tokenizers`.

    path: the file, or a folder that holds tokenizer.json or tokenizer.model. eod_token: the name of the token that stands between
    documents; None: the tokenizer's own, which is `<doc>` or </s> of SentencePiece, the `eos_token` that tokenizer_config.json or
    special_tokens_map.json beside a tokenizer.json names, or the only special token with a usual name (<|endoftext|>,
    <|end_of_text|>, </s>, <eos>). Raises DataError: the file is missing or damaged, or its EOD token is not known.
    """
    place = Path(path)
    if place.is_dir():
        found = [place / name for name in _FILES if (place / name).is_file()]
        if not found:
            raise DataError(f"the tokenizer folder {path} holds neither {' nor '.join(_FILES)}; correct the path")
        place = found[0]
    try:
        content = retry_transient(place.read_bytes)
    except OSError as error:
        if is_transient(error):
            raise unreadable(place, error) from error
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}; train one or correct the path") from error
    if content[:1] == b"{":
        from baton.data_pipeline.hf_tokenizer import HfTokenizer

        return HfTokenizer(place, content, eod_token)
    from baton.data_pipeline.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(place, content, eod_token)
