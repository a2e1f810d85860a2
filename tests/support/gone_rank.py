"""A rank of a small model with context parallelism in which one rank disappears in the middle of a layer of the second step."""

import os
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

RANKS, TIMEOUT_S = 4, 20.0
FAULTY = 2


def one_rank(rank: int, folder: Path, fault: str, direction: str) -> None:
    """Train until a message is missed, and end the process as a worker does; what it says is in the folder's file said-RANK.

    fault: "killed" or "hanging", of rank FAULTY where it would send a State to the "right", or a cotangent to the "left", from
    layer 1; the folder then has a file "fault".
    """
    from baton.parallel.errors import CommError

    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    status = 1
    try:
        _steps(rank, folder, fault, direction)
    except CommError as error:
        print(f"baton: {error}", flush=True)
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _steps(rank: int, folder: Path, fault: str, direction: str) -> None:
    import torch

    from baton.models.config import ModelConfig
    from baton.models.lm import LanguageModel
    from baton.models.settings import SMALL_WIDTH, kinds
    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig
    from baton.parallel.param_layout import initialize_parameters

    torch.set_num_threads(1)
    config = ModelConfig(d_model=SMALL_WIDTH, n_layers=3, vocab_size=16, mixers={"mamba": kinds()["mamba"].small()})
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < RANKS:  # to start may take longer than a message may
        time.sleep(0.02)
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    store.set_timeout(timedelta(seconds=60))
    mesh = meshes.initialize(LayoutConfig(context=RANKS, timeout_s=TIMEOUT_S), device=torch.device("cpu"), rank=rank, store=store)
    model = LanguageModel(config, link=mesh.link)
    initialize_parameters(model, 0, 0, 1)
    tokens, pos = torch.randint(16, (1, 8)), 8 * rank + torch.arange(8)[None]
    send, steps = mesh.link.send, [0]

    def send_or_not(towards, carrier, *message):
        if rank == FAULTY and len(steps) == 2 and (towards, carrier.where) == (direction, "layers.1.mamba"):
            (folder / "fault").touch()
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        send(towards, carrier, *message)

    mesh.link.send = send_or_not
    while len(steps) < 100:
        model(tokens, pos)[0].sum().backward()
        steps.append(0)


def ended(*arguments: object) -> None:
    """In place of what a process computes: the system ends it."""
    os.kill(os.getpid(), signal.SIGKILL)
