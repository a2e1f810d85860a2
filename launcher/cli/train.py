"""`baton train`: trains a model on this machine, or resumes the run."""

import argparse
import sys

from baton.launcher.cli.arguments import CHANGE_HELP, Subparsers, add_command, add_run_file, load_run


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "train", _run, "train a model, or resume the run that is in its directory")
    add_run_file(parser, "training.steps=100")
    parser.add_argument("--change", action="store_true", help=CHANGE_HELP)


def _run(arguments: argparse.Namespace) -> int:
    from baton.launcher.inputs import check_inputs
    from baton.launcher.processes import run_ranks
    from baton.launcher.run_directory import end_attempt, needs_less_memory, open_attempt

    config = load_run(arguments)
    check_inputs(config)
    for note in config.notes():
        print(note, file=sys.stderr)
    limits = {"limit_s": config.layout.timeout_s, "startup_timeout_s": config.jobs.startup_timeout_s}
    while True:
        with open_attempt(config, change=arguments.change) as attempt:
            status = end_attempt(attempt, run_ranks(config.layout.world_size, attempt, **limits))
        if status != 1 or not needs_less_memory(config, attempt):
            return status
        print("baton: out of memory; starting again with settings that need less", file=sys.stderr)
