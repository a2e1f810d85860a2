"""`baton import` and `baton export`: models of other libraries, read as a run's beginning and written from a run."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command, positive_int


def add(commands: Subparsers) -> None:
    read = add_command(commands, "import", _import, "read a model of another library: settings and weights for a run")
    read.add_argument("folder", type=Path, metavar="FOLDER", help="has config.json, and weights as safetensors or .bin files")
    read.add_argument(
        "--out", type=Path, required=True, metavar="NAME", help="writes NAME.yaml and NAME.safetensors, which do not exist yet"
    )
    read.add_argument(
        "--to",
        choices=("gsa", "gla", "retnet", "gated_delta_net", "mamba2"),
        help="convert a Transformer into a recurrent model, to be finetuned (T2R)",
    )
    read.add_argument(
        "--keep-attention", type=_every, default=0, metavar="1/N", help="with --to: the share of layers that stay attention"
    )
    write = add_command(
        commands,
        "export",
        _export,
        "write a run's model as a folder that transformers loads, with code of its own where transformers has no class",
    )
    write.add_argument("place", type=Path, metavar="RUN", help="a run directory, or a checkpoint's folder")
    write.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a folder that does not exist yet")
    write.add_argument("--step", type=positive_int, metavar="N", help="of the checkpoint (default: the newest whole one)")
    write.add_argument(
        "--licence", metavar="SPDX", help="of the weights, for the model card, such as apache-2.0 (default: not stated)"
    )
    write.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(default float32)")


def _every(text: str) -> int:
    """N of "1/N"."""
    first, _, last = text.partition("/")
    if first != "1" or not last.isdigit() or int(last) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not 1/N with a whole N of at least 2, such as 1/4")
    return int(last)


def _import(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.tokenizer import tokenizer_files
    from baton.launcher.interchange import import_model

    out = arguments.out
    model, library = import_model(arguments.folder, out, to=arguments.to, keep_attention=arguments.keep_attention, say=print)
    print(f"{library}: {model.n_layers} layers, d_model {model.d_model}, vocabulary {model.vocab_size}")
    file = f"{out}.safetensors" if arguments.to is None else f"{{file: {out}.safetensors, missing: initialise}}"
    data = f", data: {{tokenizer: {arguments.folder}}}" if tokenizer_files(arguments.folder) else ""
    print(f"in a run file: model: {out}.yaml, training: {{initial_weights: {file}}}{data}")


def _export(arguments: argparse.Namespace) -> None:
    import torch

    from baton.launcher.interchange import export_model

    dtype = None if arguments.dtype == "float32" else getattr(torch, arguments.dtype)
    checkpoint, library = export_model(arguments.place, arguments.out, step=arguments.step, dtype=dtype, licence=arguments.licence)
    print(f"{arguments.out}: weights of {checkpoint}, in the format of {library}")
    if (arguments.out / "tokenizer.model").exists() and not (arguments.out / "tokenizer.json").exists():
        print("note: a tokenizer.json would give other ids than tokenizer.model on some texts, so it was not written")
