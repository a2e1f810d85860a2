"""`baton compile`: compiles a run's kernels before it starts."""

import argparse

from baton.launcher.cli.arguments import Subparsers, add_command, add_run_file, compute_capability, positive_int


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "compile", _run, "compile a run's kernels before it starts, also where there is no GPU")
    add_run_file(parser, "training.micro_batch_size=8")
    parser.add_argument(
        "--capability", type=compute_capability, metavar="N.N", help="of the GPU, e.g. 9.0 of an H200 (default: the one here)"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", default="", help="CUDA's name of it, for rows of the table of launch configurations that have one"
    )
    parser.add_argument("--processes", type=positive_int, metavar="N", help="that compile at once (default: the usable cores)")
    parser.add_argument(
        "--dearest", type=positive_int, default=0, metavar="N", help="also print what the N dearest took to compile"
    )


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.kernels import compile_run

    return compile_run(
        arguments.config, arguments.overrides, arguments.capability, arguments.gpu, arguments.processes, arguments.dearest
    )
