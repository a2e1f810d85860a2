"""`baton tokenizer`: trains a tokenizer on a dataset."""

import argparse

from baton.launcher.cli.arguments import Subparsers, add_command, add_group, positive_int


def add(commands: Subparsers) -> None:
    tokenizer = add_group(commands, "tokenizer", "train a tokenizer")
    learn = add_command(tokenizer, "train", _train, "train a tokenizer on a dataset's training split")
    learn.add_argument("dataset", help="a dataset of text that `baton data prepare` wrote")
    learn.add_argument("--out", required=True, help="the .model or tokenizer.json file to write")
    kinds = "sentencepiece (default): a .model of BPE with byte fallback; hf-bpe: a tokenizer.json of byte-level BPE"
    learn.add_argument("--kind", choices=("sentencepiece", "hf-bpe"), default="sentencepiece", help=kinds)
    learn.add_argument("--vocab-size", type=positive_int, required=True, help="tokens in all, 256 of them bytes")


def _train(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.dataset import Dataset
    from baton.data_pipeline.evaluation import documents
    from baton.data_pipeline.tokenizer_training import train_tokenizer

    texts = documents(Dataset.open(arguments.dataset), "train")
    print(train_tokenizer(texts, arguments.out, arguments.vocab_size, kind=arguments.kind))
