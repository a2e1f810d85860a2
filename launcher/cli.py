"""The `baton` command. Every import that costs time happens inside the command that needs it: help is instant."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from baton.launcher import bytecode
from baton.launcher.fork import add_command as add_fork
from baton.launcher.jobs import CHANGE, add_commands


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status (0 well, 1 failed, 2 bad input, 74 files that fail at present, 75 busy or stopped)."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(arguments, "overrides") and all("=" in word and not word.startswith("-") for word in rest)):
        _refuse_words(arguments.parser, rest)
    if rest:  # key=value words after an option, which argparse does not expect there
        arguments.overrides += rest
    bytecode.keep()
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        from baton.launcher.errors import explained

        status, text = explained(error)
        if status is None:
            raise
        print(f"baton: {text}", file=sys.stderr)
        return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton", description="Pretrain recurrent language models on very long contexts.")
    parser.add_argument("--version", action="version", version=f"baton {version('baton-lm')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = _command(commands, "train", _train, "train a model, or resume the run that is in its directory")
    train.add_argument("config", metavar="RUN.yaml", help="the run's configuration")
    train.add_argument("overrides", metavar="key=value", nargs="*", help="settings over the file's, e.g. training.steps=100")
    train.add_argument("--change", action="store_true", help=CHANGE)

    plan = _command(commands, "plan", _plan, "what a run takes, without a GPU: memory, bytes exchanged, time, what to change")
    plan.add_argument("config", metavar="RUN.yaml", help="the run's configuration")
    plan.add_argument("overrides", metavar="key=value", nargs="*", help="settings over the file's, e.g. layout.data=512")
    plan.add_argument("--cluster", metavar="FILE", help="a cluster's .yaml file, or a100, h100, h200: adds times and a verdict")
    plan.add_argument("--memory-gib", type=_memory, metavar="N", help="GiB that a rank may fill (default: the cluster's)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")

    doctor = _command(commands, "doctor", _doctor, "compare every recurrence with its definition on this machine")
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")

    tune = _command(
        commands,
        "tune",
        _tune,
        "find the fastest launch configurations of a run's kernels on this GPU, for the table that all runs use",
    )
    tune.add_argument("config", metavar="RUN.yaml", help="the run's configuration")
    tune.add_argument(
        "overrides", metavar="key=value", nargs="*", help="settings over the file's, e.g. training.micro_batch_size=8"
    )
    tune.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this one; may be given again (default: all)"
    )
    tune.add_argument("--table", type=Path, metavar="FILE", help="the table to change (default: the package's own)")

    ahead = _command(commands, "compile", _compile, "compile a run's kernels before it starts, also where there is no GPU")
    ahead.add_argument("config", metavar="RUN.yaml", help="the run's configuration")
    ahead.add_argument(
        "overrides", metavar="key=value", nargs="*", help="settings over the file's, e.g. training.micro_batch_size=8"
    )
    ahead.add_argument(
        "--capability", type=_capability, metavar="N.N", help="of the GPU, e.g. 9.0 of an H200 (default: the one here)"
    )
    ahead.add_argument(
        "--gpu", metavar="NAME", default="", help="CUDA's name of it, for rows of the table of launch configurations that have one"
    )
    ahead.add_argument("--processes", type=_positive, metavar="N", help="that compile at once (default: the usable cores)")
    ahead.add_argument("--dearest", type=_positive, default=0, metavar="N", help="also print what the N dearest took to compile")

    generate = _command(commands, "generate", _generate, "write text with a run's newest checkpoint")
    generate.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    generate.add_argument("--prompt", default="", help="text to go on from (default: the start of a document)")
    generate.add_argument("--tokens", type=_positive, default=200, help="tokens to write at most (default 200)")
    generate.add_argument("--temperature", type=_not_negative, default=0.8, help="0 takes the likeliest token (default 0.8)")
    generate.add_argument("--top-k", type=_count, default=0, help="draw among the k likeliest (default: all)")
    generate.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    generate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")

    evaluate = _command(commands, "evaluate", _evaluate, "evaluate one checkpoint of a run, on one process")
    evaluate.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    evaluate.add_argument("--step", type=_count, help="the checkpoint's (default: the newest checkpoint)")
    evaluate.add_argument("--out", type=Path, help="the file that gets a row (default RUN/evaluations.jsonl)")
    evaluate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")

    plot = _command(commands, "plot", _plot, "draw a run's curves, or several runs' validation losses, into a PNG")
    plot.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="a run directory; several: all in one picture")
    plot.add_argument("--out", type=Path, help="the picture (default RUN/curves.png; of several, RUN/compared.png of the first)")

    _checkpoint_commands(_group(commands, "checkpoint", "list, verify, compare, prune and export a run's checkpoints"))
    add_commands(commands, _command)
    add_fork(commands, _command)

    data = _group(commands, "data", "prepare, verify and inspect datasets")
    prepare = _command(data, "prepare", _prepare, "turn text into WebDataset shards of documents")
    kinds = "folders; text, JSON lines or arrays, WebDataset .tar (each also .gz, .zst, .xz, .bz2), .parquet"
    prepare.add_argument("inputs", metavar="INPUT", nargs="+", help=kinds)
    prepare.add_argument("--out", required=True, help="the dataset's folder; what is finished in it is kept")
    prepare.add_argument("--include", action="append", metavar="GLOB", help="files to take from folders, e.g. '*.py' (repeatable)")
    prepare.add_argument("--exclude", action="append", metavar="GLOB", help="files to leave out, also of an unfinished dataset")
    prepare.add_argument("--tokenizer", help="a .model file: store token ids instead of text")
    prepare.add_argument("--workers", type=_positive, help="processes (default: the usable cores)")
    prepare.add_argument("--shard-bytes", type=_positive, help="text bytes per shard (default 256 MiB)")
    prepare.add_argument("--validation-fraction", type=float, help="share of documents held out, by content hash (default 0.02)")
    prepare.add_argument("--text-field", help="field or column that holds the text (default text)")
    verify = _command(data, "verify", _verify, "check every checksum and count of a dataset")
    verify.add_argument("dataset")
    inspect = _command(data, "inspect", _inspect, "what is in a dataset")
    inspect.add_argument("dataset")

    tokenizer = _group(commands, "tokenizer", "train a tokenizer")
    learn = _command(tokenizer, "train", _tokenizer_train, "train a SentencePiece BPE tokenizer on a dataset's training split")
    learn.add_argument("dataset", help="a dataset of text that `baton data prepare` wrote")
    learn.add_argument("--out", required=True, help="the .model file to write")
    learn.add_argument("--vocab-size", type=_positive, required=True, help="tokens in all, 256 of them bytes")
    return parser


def _checkpoint_commands(checkpoint: argparse._SubParsersAction[Any]) -> None:
    place: dict[str, Any] = {"metavar": "PLACE", "type": Path, "help": "a run directory, or a checkpoint's folder"}
    listed = _command(checkpoint, "list", _checkpoint_list, "the checkpoints of a run: step, tokens, size, validation loss, layout")
    listed.add_argument("place", **place)
    verify = _command(checkpoint, "verify", _checkpoint_verify, "compare every file and tensor with its checksum")
    verify.add_argument("place", **place)
    diff = _command(checkpoint, "diff", _checkpoint_diff, "what two checkpoints differ in, whatever layouts wrote them")
    diff.add_argument("one", **place)
    diff.add_argument("other", **place)
    prune = _command(checkpoint, "prune", _checkpoint_prune, "delete the checkpoints of a run that need not stay")
    prune.add_argument("place", **place)
    prune.add_argument("--keep-last", type=_positive, default=1, metavar="N", help="the newest (default 1)")
    prune.add_argument(
        "--keep-every", type=_count, default=0, metavar="N", help="those of steps that are a multiple (default none)"
    )
    prune.add_argument(
        "--keep-best", type=_count, default=0, metavar="N", help="those with the lowest validation loss (default none)"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    export = _command(checkpoint, "export", _checkpoint_export, "write a checkpoint's weights as one safetensors file")
    export.add_argument("place", **place)
    export.add_argument("out", type=Path, help="the .safetensors file")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(default float32)")


def _group(commands: argparse._SubParsersAction[Any], name: str, help: str) -> argparse._SubParsersAction[Any]:
    return commands.add_parser(name, help=help, description=help).add_subparsers(metavar="COMMAND", required=True)


def _command(
    commands: argparse._SubParsersAction[Any], name: str, run: Callable[[argparse.Namespace], int | None], help: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _refuse_words(parser: argparse.ArgumentParser, words: list[str]) -> NoReturn:
    """End with the usage of the command that does not know these words, and the option that was probably meant."""
    options = [option for action in parser._actions for option in action.option_strings]
    close = [difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.7) for word in words if word[:1] == "-"]
    if any(close):
        hint = f" (did you mean {' '.join(match[0] for match in close if match)}?)"
    elif close and any(action.dest == "overrides" for action in parser._actions):
        hint = " (settings are words of the form key=value, as training.steps=100)"
    else:
        hint = ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def _capability(text: str) -> int:
    """Ten times major, and minor."""
    major, minor = map(int, text.split("."))
    return 10 * major + minor


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive number")
    return value


def _memory(text: str) -> float:
    value = _not_negative(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _plan(arguments: argparse.Namespace) -> int:
    import json

    from baton.launcher.cluster import load_cluster
    from baton.launcher.config import load
    from baton.launcher.inputs import missing_inputs, with_known_vocabulary
    from baton.launcher.plan import make_plan
    from baton.launcher.run_directory import settled

    config = with_known_vocabulary(load(arguments.config, arguments.overrides))
    cluster = None if arguments.cluster is None else load_cluster(arguments.cluster)
    # without a cluster it is a GPU's memory that is planned
    config = settled(config, "cpu" if config.device == "cpu" else cluster.kind if cluster is not None else "cuda")
    plan = make_plan(config, cluster, arguments.memory_gib)
    missing = missing_inputs(config)
    if arguments.json:
        print(json.dumps(plan.to_json() | {"missing": missing}, indent=2))
    else:
        print("\n".join(plan.lines()))
        print("".join(f"{line}\n" for line in missing), end="", file=sys.stderr)
    return 2 if plan.fits is False else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from baton.launcher.kernels import check_machine

    return check_machine(arguments.device)


def _tune(arguments: argparse.Namespace) -> int:
    from baton.launcher.config import load
    from baton.launcher.errors import ConfigError
    from baton.launcher.inputs import with_known_vocabulary
    from baton.parallel.mesh import local_device
    from baton.training.kernel_tools.autotune import PATH, tune_run_kernels

    config, device = with_known_vocabulary(load(arguments.config, arguments.overrides)), local_device(0, 1, "auto")
    if device.type != "cuda":
        raise ConfigError("there is no GPU here: kernels are tuned on a GPU of the kind that will run them")
    path = arguments.table or PATH
    for tuned in tune_run_kernels(config.model, config.training, config.layout, device, path, arguments.kernel):
        print(tuned, flush=True)
    print(f"written to {path}")
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    from baton.launcher.kernels import compile_run

    return compile_run(
        arguments.config, arguments.overrides, arguments.capability, arguments.gpu, arguments.processes, arguments.dearest
    )


def _train(arguments: argparse.Namespace) -> int:
    from baton.launcher.config import load
    from baton.launcher.inputs import check_inputs
    from baton.launcher.processes import run_ranks
    from baton.launcher.run_directory import end_attempt, open_attempt

    config = load(arguments.config, arguments.overrides)
    check_inputs(config)
    for note in config.notes():
        print(note, file=sys.stderr)
    limits = {"limit_s": config.layout.timeout_s, "startup_timeout_s": config.jobs.startup_timeout_s}
    with open_attempt(config, change=arguments.change) as attempt:
        return end_attempt(attempt, run_ranks(config.layout.world_size, attempt, **limits))


def _generate(arguments: argparse.Namespace) -> None:
    from baton.launcher.generate import generate_text

    text = generate_text(
        arguments.folder,
        arguments.prompt,
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        device=arguments.device,
    )
    print(arguments.prompt + text)


def _checkpoint_list(arguments: argparse.Namespace) -> None:
    from baton.training.checkpoint.tools import listing

    print("\n".join(listing(arguments.place)))


def _checkpoint_verify(arguments: argparse.Namespace) -> int:
    from baton.training.checkpoint.tools import verified

    statuses = [0]
    for status, line in verified(arguments.place):
        statuses.append(status)
        print(line, flush=True)
    return 1 if 1 in statuses else max(statuses)


def _checkpoint_diff(arguments: argparse.Namespace) -> int:
    from baton.training.checkpoint.tools import checkpoints_of, differences

    one, other = (checkpoints_of(place)[-1] for place in (arguments.one, arguments.other))
    found = differences(one, other)
    print("\n".join(found) if found else f"{one} and {other} are equal")
    return 1 if found else 0


def _checkpoint_prune(arguments: argparse.Namespace) -> None:
    from baton.training.checkpoint.retention import Retention
    from baton.training.checkpoint.tools import pruned

    retention = Retention(arguments.keep_last, arguments.keep_every, arguments.keep_best)
    gone = pruned(arguments.place, retention, delete=not arguments.dry_run)
    for path in gone:
        print(f"{'would delete' if arguments.dry_run else 'deleted'} {path}")
    print(f"{len(gone)} checkpoints" + (" would be deleted" if arguments.dry_run else " deleted"))


def _checkpoint_export(arguments: argparse.Namespace) -> None:
    import torch

    from baton.training.checkpoint.tools import export

    dtype = None if arguments.dtype == "float32" else getattr(torch, arguments.dtype)
    print(f"{arguments.out}: weights of {export(arguments.place, arguments.out, dtype)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from baton.launcher.evaluate import evaluate_checkpoint

    evaluate_checkpoint(arguments.folder, arguments.step, arguments.device, arguments.out)


def _plot(arguments: argparse.Namespace) -> None:
    from baton.training.monitoring.plots import plot_runs

    print(plot_runs(arguments.folders, arguments.out))


def _prepare(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.prepare import prepare

    names = ("include", "exclude", "tokenizer", "workers", "shard_bytes", "validation_fraction", "text_field")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    print(prepare(arguments.inputs, arguments.out, **given))


def _verify(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.verify import verify

    print(verify(arguments.dataset))


def _inspect(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.verify import inspect

    print(inspect(arguments.dataset))


def _tokenizer_train(arguments: argparse.Namespace) -> None:
    from baton.data_pipeline.dataset import Dataset
    from baton.data_pipeline.evaluation import documents
    from baton.data_pipeline.tokenizer import train_tokenizer

    texts = documents(Dataset.open(arguments.dataset), "train")
    print(train_tokenizer(texts, arguments.out, arguments.vocab_size))


if __name__ == "__main__":
    sys.exit(main())
