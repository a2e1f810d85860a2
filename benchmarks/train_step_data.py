"""Real text for train_step.py: the source of Python's standard library, as token ids of a vocabulary of any size.

A tokenizer learns a few thousand pieces in seconds. The remaining pieces, up to the model's vocabulary size, exist but do not
occur in the text. The cost of a step depends on their number only.
"""

import sysconfig
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sentencepiece

from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.tokenizer_training import train_tokenizer

PIECES = 4096
DOCUMENT = 96 << 10
"""Characters of a document: longer than rows of 16k tokens, so that few begin within one, and as many as a step has rows."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def text_for(vocab_size: int, folder: Path, documents: int | None = None) -> dict[str, Any]:
    """A run's `data`: shards and tokenizer in a folder, made unless they are there. documents: at most so many."""
    texts, shards, tokenizer = (folder / name for name in ("texts", f"shards-{vocab_size}", f"tokenizer-{vocab_size}.model"))
    if not texts.exists():
        write_texts(texts, documents)
    if not shards.exists():
        train_tokenizer((path.read_text("utf-8") for path in sorted(texts.iterdir())), tokenizer, min(vocab_size, PIECES))
        pad_vocabulary(tokenizer, vocab_size)
        prepare([texts], shards, tokenizer=tokenizer, validation_fraction=0, progress=lambda done, of: None)
    return {"path": str(shards), "tokenizer": str(tokenizer), "unit_documents": 1}


def write_texts(folder: Path, documents: int | None) -> None:
    """Modules one after the other, DOCUMENT characters or a little more to a file."""
    aside = folder.with_name(f"{folder.name}.new")
    aside.mkdir(parents=True, exist_ok=True)
    number, pieces, size = 0, list[str](), 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if _LEFT_OUT & set(path.parts):
            continue
        pieces.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(pieces[-1])
        if size >= DOCUMENT:
            (aside / f"{number:03d}.txt").write_text("".join(pieces), encoding="utf-8")
            number, pieces, size = number + 1, [], 0
        if documents is not None and number >= documents:
            break
    aside.rename(folder)


def pad_vocabulary(path: Path, vocab_size: int) -> None:
    """Give a tokenizer pieces that no text has."""
    model = sentencepiece.ModelProto()
    model.ParseFromString(path.read_bytes())
    least = min(piece.score for piece in model.pieces)
    for n in range(vocab_size - len(model.pieces)):
        # two characters of Unicode's private planes
        model.pieces.add(piece=chr(0xF0000 + n // 4096) + chr(0x100000 + n % 4096), score=least - 1 - n)
    model.trainer_spec.vocab_size = vocab_size
    path.write_bytes(model.SerializeToString())
