"""`baton checkpoint`: lists, verifies, compares, prunes and exports a run's checkpoints."""

import argparse
from pathlib import Path
from typing import Any

from baton.launcher.cli.arguments import Subparsers, add_command, add_group, non_negative_int, positive_int


def add(commands: Subparsers) -> None:
    checkpoint = add_group(commands, "checkpoint", "list, verify, compare, prune and export a run's checkpoints")
    place: dict[str, Any] = {"metavar": "PLACE", "type": Path, "help": "a run directory, or a checkpoint's folder"}
    listed = add_command(checkpoint, "list", _list, "the checkpoints of a run: step, tokens, size, validation loss, layout")
    listed.add_argument("place", **place)
    verify = add_command(checkpoint, "verify", _verify, "compare every file and tensor with its checksum")
    verify.add_argument("place", **place)
    diff = add_command(checkpoint, "diff", _diff, "what two checkpoints differ in, whatever layouts wrote them")
    diff.add_argument("one", **place)
    diff.add_argument("other", **place)
    prune = add_command(checkpoint, "prune", _prune, "delete the checkpoints of a run that need not stay")
    prune.add_argument("place", **place)
    prune.add_argument("--keep-last", type=positive_int, default=1, metavar="N", help="the newest (default 1)")
    prune.add_argument(
        "--keep-every", type=non_negative_int, default=0, metavar="N", help="those of steps that are a multiple (default none)"
    )
    prune.add_argument(
        "--keep-best", type=non_negative_int, default=0, metavar="N", help="those with the lowest validation loss (default none)"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    export = add_command(checkpoint, "export", _export, "write a checkpoint's weights as one safetensors file")
    export.add_argument("place", **place)
    export.add_argument("out", type=Path, help="the .safetensors file")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(default float32)")


def _list(arguments: argparse.Namespace) -> None:
    from baton.training.checkpoint.tools import listing

    print("\n".join(listing(arguments.place)))


def _verify(arguments: argparse.Namespace) -> int:
    from baton.training.checkpoint.tools import verified

    statuses = [0]
    for status, line in verified(arguments.place):
        statuses.append(status)
        print(line, flush=True)
    return 1 if 1 in statuses else max(statuses)


def _diff(arguments: argparse.Namespace) -> int:
    from baton.training.checkpoint.tools import checkpoints_of, differences

    one, other = (checkpoints_of(place)[-1] for place in (arguments.one, arguments.other))
    found = differences(one, other)
    print("\n".join(found) if found else f"{one} and {other} are equal")
    return 1 if found else 0


def _prune(arguments: argparse.Namespace) -> None:
    from baton.training.checkpoint.retention import Retention
    from baton.training.checkpoint.tools import pruned

    retention = Retention(arguments.keep_last, arguments.keep_every, arguments.keep_best)
    gone = pruned(arguments.place, retention, delete=not arguments.dry_run)
    for path in gone:
        print(f"{'would delete' if arguments.dry_run else 'deleted'} {path}")
    print(f"{len(gone)} checkpoints" + (" would be deleted" if arguments.dry_run else " deleted"))


def _export(arguments: argparse.Namespace) -> None:
    import torch

    from baton.training.checkpoint.tools import export

    dtype = None if arguments.dtype == "float32" else getattr(torch, arguments.dtype)
    print(f"{arguments.out}: weights of {export(arguments.place, arguments.out, dtype)}")
