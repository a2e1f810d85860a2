"""`baton tune`: finds the fastest launch configurations of a run's kernels on this GPU."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command, add_run_file, load_run


def add(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "tune",
        _run,
        "find the fastest launch configurations of a run's kernels on this GPU, for the table that all runs use",
    )
    add_run_file(parser, "training.micro_batch_size=8")
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this one; may be given again (default: all)"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="the table to change (default: the package's own)")


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.errors import ConfigError
    from baton.launcher.inputs import with_known_vocabulary
    from baton.parallel.mesh import local_device
    from baton.training.kernel_tools.autotune import PATH, tune_run_kernels

    config, device = with_known_vocabulary(load_run(arguments)), local_device(0, 1, "auto")
    if device.type != "cuda":
        raise ConfigError("there is no GPU here: kernels are tuned on a GPU of the kind that will run them")
    path = arguments.table or PATH
    for tuned in tune_run_kernels(config.model, config.training, config.layout, device, path, arguments.kernel):
        print(tuned, flush=True)
    print(f"written to {path}")
    return 0
