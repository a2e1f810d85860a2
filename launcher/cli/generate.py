"""`baton generate`: writes text with a run's newest checkpoint."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command, non_negative_float, non_negative_int, positive_int


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "generate", _run, "write text with a run's newest checkpoint")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--prompt", default="", help="text to go on from (default: the start of a document)")
    parser.add_argument("--tokens", type=positive_int, default=200, help="tokens to write at most (default 200)")
    parser.add_argument("--temperature", type=non_negative_float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=non_negative_int, default=0, help="draw among the k likeliest (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _run(arguments: argparse.Namespace) -> None:
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
