"""`load_tokenizer`, the one way to read a tokenizer's file, whichever library made it."""

import os
from pathlib import Path

from baton.data_pipeline.errors import DataError, is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.files import LFS_POINTER
from baton.data_pipeline.tokenizer_base import Ids, Losses, Tokenizer

__all__ = ["TOKENIZER_FILES", "Ids", "Losses", "Tokenizer", "load_tokenizer", "tokenizer_files"]

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def tokenizer_files(folder: Path) -> list[Path]:
    """The files in a folder that may be its tokenizer."""
    return [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]


def load_tokenizer(path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
    """A tokenizer from its file: a SentencePiece .model, or a tokenizer.json of Hugging Face's `tokenizers`.

    Args:
        path: the file, or a folder that holds tokenizer.model or tokenizer.json. Of both it is the SentencePiece model, from which
            the other was converted, unless tokens have been added to that.
        eod_token: the name of the token that stands between documents. None: the `eos_token` that tokenizer_config.json or
            special_tokens_map.json beside the file names; else the special token that is the `eos_token_id` of a config.json beside
            it; else the tokenizer's own, which is `<doc>` or </s> of SentencePiece, or the only special token with a usual name
            (<|endoftext|>, <|end_of_text|>, </s>, <eos>).

    Raises DataError: the file is missing or damaged, or (UnknownEodError) its EOD token is not known.
    """
    place = Path(path)
    if not place.is_dir():
        return _load(place, _content(place), eod_token)
    files = tokenizer_files(place)
    if not files:
        raise DataError(f"the tokenizer folder {path} holds neither {' nor '.join(TOKENIZER_FILES)}; correct the path")
    loaded = []
    for file in files:
        content = _content(file)
        try:
            loaded.append(_load(file, content, eod_token))
        except DataError:
            if file == files[-1]:
                raise  # other kinds of files are called tokenizer.model too, but not tokenizer.json
    return max(loaded, key=lambda tokenizer: tokenizer.vocab_size)  # of equal ones the first


def _content(path: Path) -> bytes:
    try:
        content = retry_transient(path.read_bytes)
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from error
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}; train one or correct the path") from error
    if content.startswith(LFS_POINTER):
        raise DataError(f"the tokenizer {path} is what Git LFS puts in a file's place; run `git lfs pull` in its folder")
    return content


def _load(path: Path, content: bytes, eod_token: str | None) -> Tokenizer:
    if content[:1] == b"{":
        from baton.data_pipeline.hf_tokenizer import HfTokenizer

        return HfTokenizer(path, content, eod_token)
    from baton.data_pipeline.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(path, content, eod_token)
