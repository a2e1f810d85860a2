"""`baton generate`: writes text with a run's checkpoint."""

import argparse
from pathlib import Path

from baton.launcher.cli.arguments import Subparsers, add_command, non_negative_float, non_negative_int, positive_int, share


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "generate", _run, "write text with a run's checkpoint")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run directory, a checkpoint's folder, or a model's folder")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", default="", help="text to go on from (default: the start of a document)")
    given.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line; of a .jsonl file strings, or objects' prompt")
    parser.add_argument("--samples", type=positive_int, default=1, metavar="N", help="texts to write for each prompt (default 1)")
    parser.add_argument("--batch", type=positive_int, default=16, metavar="N", help="texts written at a time (default 16)")
    parser.add_argument("--step", type=non_negative_int, metavar="N", help="the checkpoint's (default: the newest whole one)")
    parser.add_argument("--tokens", type=positive_int, default=200, help="tokens to write at most (default 200)")
    parser.add_argument("--temperature", type=non_negative_float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=non_negative_int, default=0, help="draw among the k likeliest (default: all)")
    parser.add_argument(
        "--top-p", type=share, default=1.0, metavar="P", help="draw among the likeliest that have this probability (default 1: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def _run(arguments: argparse.Namespace) -> None:
    import json

    from baton.launcher.generate import check_prompt, generate_text, read_prompts

    check_prompt(arguments.prompt)
    found = generate_text(
        arguments.folder,
        [arguments.prompt] if arguments.prompts is None else read_prompts(arguments.prompts),
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        samples=arguments.samples,
        batch=arguments.batch,
        step=arguments.step,
        device=arguments.device,
    )
    for sample in found:
        if arguments.prompts is None and arguments.samples == 1:
            print(sample.prompt + sample.text, flush=True)
        else:
            row = {"prompt": sample.prompt, "sample": sample.number, "text": sample.text}
            print(json.dumps(row, ensure_ascii=False), flush=True)
