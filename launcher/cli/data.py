"""`baton data`: prepares, verifies and inspects datasets."""

import argparse

from baton.launcher.cli.arguments import Subparsers, add_command, add_group, positive_int, refuse_with, refuse_without


def add(commands: Subparsers) -> None:
    data = add_group(commands, "data", "prepare, index, verify and inspect datasets")
    prepare = add_command(data, "prepare", _prepare, "turn text into WebDataset shards of documents")
    kinds = "folders; text, JSON lines or arrays, WebDataset .tar (each also .gz, .zst, .xz, .bz2), .parquet, .arrow; with --ids: "
    kinds += "Megatron's .bin with .idx, flat .bin and .npy, lists in .parquet and .arrow, .npy in .tar"
    prepare.add_argument("inputs", metavar="INPUT", nargs="+", help=kinds)
    prepare.add_argument("--out", required=True, help="the dataset's folder; what is finished in it is kept")
    prepare.add_argument("--include", action="append", metavar="GLOB", help="files to take from folders, e.g. '*.py' (repeatable)")
    prepare.add_argument("--exclude", action="append", metavar="GLOB", help="files to leave out, also of an unfinished dataset")
    prepare.add_argument("--tokenizer", help="a .model or tokenizer.json file, or a folder with one: store ids instead of text")
    prepare.add_argument("--eod-token", help="the token between documents (default: the tokenizer's EOS token)")
    prepare.add_argument("--ids", action="store_true", help="the inputs hold token ids of --tokenizer")
    prepare.add_argument("--ids-dtype", choices=("uint16", "uint32"), help="of a flat .bin file (default uint16)")
    prepare.add_argument("--ids-field", help="column that holds lists of ids (default input_ids)")
    prepare.add_argument("--separator-id", type=int, help="id between a flat file's documents (default: the EOD token)")
    prepare.add_argument("--workers", type=positive_int, help="processes (default: the usable cores)")
    prepare.add_argument("--shard-bytes", type=positive_int, help="text bytes per shard (default 256 MiB)")
    prepare.add_argument("--validation-fraction", type=float, help="share of documents held out, by content hash (default 0.02)")
    prepare.add_argument("--text-field", help="field or column that holds the text (default text)")
    index = add_command(data, "index", _index, "make a dataset of WebDataset shards where they lie: an index beside each tar")
    index.add_argument("folder", help="a folder of .tar whose samples have .txt, .json or .npy members")
    index.add_argument("--validation-shards", metavar="GLOB", help="names of the tars that are held out (default: none)")
    index.add_argument("--text-field", help="field of .json members that holds the text (default text)")
    index.add_argument("--tokenizer", help="the tokenizer that made the ids of .npy members")
    index.add_argument("--eod-token", help="the token between documents (default: the tokenizer's EOS token)")
    index.add_argument("--workers", type=positive_int, help="processes (default: the usable cores)")
    verify = add_command(data, "verify", _verify, "check every checksum and count of a dataset")
    verify.add_argument("dataset")
    inspect = add_command(data, "inspect", _inspect, "what is in a dataset")
    inspect.add_argument("dataset")


def _prepare(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.prepare import prepare

    refuse_without(arguments, "--ids", "--ids-dtype", "--ids-field", "--separator-id")
    refuse_without(arguments, "--tokenizer", "--eod-token")
    refuse_with(arguments, "--ids", "--text-field")
    names = (
        "include",
        "exclude",
        "tokenizer",
        "eod_token",
        "ids",
        "ids_dtype",
        "ids_field",
        "separator_id",
        "workers",
        "shard_bytes",
        "validation_fraction",
        "text_field",
    )
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    print(prepare(arguments.inputs, arguments.out, **given))


def _index(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.webdataset_index import index_shards

    refuse_without(arguments, "--tokenizer", "--eod-token")
    names = ("validation_shards", "text_field", "tokenizer", "eod_token", "workers")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    print(index_shards(arguments.folder, **given))


def _verify(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.verify import verify

    print(verify(arguments.dataset))


def _inspect(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.verify import inspect

    print(inspect(arguments.dataset))
