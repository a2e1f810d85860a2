"""Generation on a GPU: new tokens per second of whole batches, reading of the prompts included, as in figure 8 of Mamba's paper.

Greedy decoding of `--new` tokens behind prompts of `--prompt` tokens, all rows different, none of which ends before. Ours is
`generate` with recorded steps, as `baton generate` and `baton.load` use it. Peers are transformers' model with our weights, which
is its Mamba (with kernels of mamba_ssm and causal_conv1d where they can be imported, which a line says) or its Llama, and beside
our Mamba its Llama at the size of the Transformer beside it. Llama has a cache of keys and values. All are in bfloat16 and generate
with their defaults. The gate: the logits behind the prompts are as near to those of transformers' model in float32 as its own in
bfloat16, and recorded steps write the tokens of others.

    python benchmarks/generation_gpu.py [--models mamba-130m,mamba-1.4b] [--peers same,transformer] [--batches 1,8,32,128]
        [--prompt 2048] [--new 128]
    python benchmarks/generation_gpu.py --models transformer-125m,transformer-1.3b
"""

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
import yaml
from report import Report
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.interchange.mapping import to_theirs
from baton.models.interchange.registry import family_of_model
from baton.models.library import language_model
from baton.models.lm import LanguageModel
from baton.parallel.param_layout import named_layouts
from baton.training.evaluation.generation import Sampling, generate, step_recorder

AS_NEAR = 1.25
"""Times transformers' error in bfloat16, through all layers, that ours may have."""

TRANSFORMERS = {
    "mamba-130m": "transformer-125m",
    "mamba-370m": "transformer-350m",
    "mamba-790m": "transformer-760m",
    "mamba-1.4b": "transformer-1.3b",
    "mamba-2.8b": "transformer-2.7b",
}
"""Models of configs/models, and the Transformer of each one's size."""
NAMES = (*TRANSFORMERS, *TRANSFORMERS.values())


def config_of(name: str) -> ModelConfig:
    return ModelConfig(**yaml.safe_load((files("baton.configs") / "models" / f"{name}.yaml").read_text()))


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """By the names of a weights file."""
    found = {}
    for name, parameter, layout in named_layouts(model):
        for block in layout.shard_boxes(name, 0, 1):
            found[block.name] = parameter.detach()[block.local_row : block.local_row + block.extent[0]]
    return found


def transformers_model(config: ModelConfig, weights: dict[str, Tensor] | None) -> Any:
    """transformers' model of a configuration on the GPU; weights: ours; None: random."""
    import transformers

    family = family_of_model(config)
    values = family.config(config)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values), dtype=torch.bfloat16)
    if weights is not None:
        theirs = to_theirs(family.maps(config), weights)
        missing, unexpected = model.load_state_dict({name: x.to("cuda") for name, x in theirs.items()}, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()


class Bench:
    def __init__(self, report: Report, arguments: argparse.Namespace) -> None:
        self.report, self.length, self.new = report, arguments.prompt, arguments.new
        self.batches = [int(size) for size in arguments.batches.split(",")]
        self.repetitions, self.kinds = arguments.repetitions, arguments.peers.split(",")

    def one_model(self, name: str) -> None:
        config = config_of(name)
        model = language_model(config, dtype=torch.bfloat16, device="cuda", seed=1)
        same = "transformers' Mamba" if name in TRANSFORMERS else "transformers' Llama"
        peers = {same: transformers_model(config, weights_of(model))}
        self._check(name, model, peers[same])
        ours = {batch: self._time(f"{name} x {batch}, ours", batch, self._ours(model, batch)) for batch in self.batches}
        if 1 in ours:
            plain = self._time(f"{name} x 1, ours, not recorded", 1, self._ours(model, 1, recorded=False))
            self.report.row(f"{name} x 1", "tokens/s", ours[1], "steps that are not recorded", plain, gate=name)
        of_kind, transformer = {"same": same}, TRANSFORMERS.get(name, "")
        if transformer:
            of_kind["transformer"] = f"transformers' Llama as {transformer}"
        for peer_name in (of_kind[kind] for kind in of_kind if kind in self.kinds):
            if peer_name not in peers:
                peers.clear()  # gives its memory back
                del model
                torch.cuda.empty_cache()
                peers[peer_name] = transformers_model(config_of(transformer), None)
            for batch in self.batches:
                case = f"{name} x {batch}"
                try:
                    theirs = self._time(f"{case}, {peer_name}", batch, self._theirs(peers[peer_name], batch))
                except torch.cuda.OutOfMemoryError:
                    self.report.say(f"{case}, {peer_name}: out of memory")
                    torch.cuda.empty_cache()
                    continue
                self.report.row(case, "tokens/s", ours[batch], peer_name, theirs, gate=name)
        peers.clear()
        torch.cuda.empty_cache()

    def prompts(self, batch: int) -> Tensor:
        """Int64 [batch, prompt]; a larger batch begins with the rows of a smaller one."""
        rows = [torch.randint(3, 30000, (self.length,), generator=torch.Generator().manual_seed(row)) for row in range(batch)]
        return torch.stack(rows)

    def _check(self, name: str, model: LanguageModel, theirs: Any) -> None:
        ids = self.prompts(4).cuda()
        with torch.no_grad():
            pos = torch.arange(self.length, dtype=torch.int32, device="cuda").expand(4, -1)
            found = model.logits(model(ids, pos)[0][:, -1])[:, : model.vocab_size]
            expected = theirs(ids, logits_to_keep=1).logits[:, 0].float()
            exact = copy.deepcopy(theirs).float()(ids, logits_to_keep=1).logits[:, 0]
        off, of_theirs = (float((x - exact).norm() / exact.norm()) for x in (found, expected))
        words = {"tokens": self.new, "vocab_size": model.vocab_size, "stop": None, "sampling": Sampling(0)}
        texts = [generate(model, ids.tolist(), **words, recorder=made) for made in (None, step_recorder(model))]
        self.report.gate(
            name,
            off <= AS_NEAR * of_theirs and texts[0] == texts[1],
            f"logits behind the prompts differ from those of transformers' model in float32 by {off:.1e}, its own in bfloat16 by "
            f"{of_theirs:.1e}, {AS_NEAR:g} times as much allowed, and recorded steps write what others write",
        )

    def _ours(self, model: LanguageModel, batch: int, recorded: bool = True) -> Callable[[], Any]:
        prompts = self.prompts(batch).tolist()
        words = {"tokens": self.new, "vocab_size": model.vocab_size, "stop": None, "sampling": Sampling(0)}
        recorder = step_recorder(model) if recorded else None  # baton.load has one a model
        return lambda: generate(model, prompts, **words, recorder=recorder)

    def _theirs(self, model: Any, batch: int) -> Callable[[], Any]:
        prompts = self.prompts(batch).cuda()
        words = {"max_new_tokens": self.new, "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), **words).shape[1] == self.length + self.new

    def _time(self, case: str, batch: int, call: Callable[[], Any]) -> float:
        """New tokens per second, the median of several calls."""
        assert call()
        seconds = []
        for _ in range(self.repetitions):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        taken = statistics.median(seconds)
        self.report.say(f"{case}: {taken:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
        return batch * self.new / taken


def kernels_of_peer() -> str:
    try:
        import causal_conv1d
        import mamba_ssm
    except ImportError as error:
        return f"transformers' Mamba takes its own PyTorch code ({error})"
    return (
        f"transformers' Mamba takes the kernels of mamba_ssm {mamba_ssm.__version__} and causal_conv1d {causal_conv1d.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mamba-130m,mamba-1.4b", help=f"separated by commas, of {', '.join(NAMES)}")
    parser.add_argument("--batches", default="1,8,32,128", help="rows, separated by commas")
    parser.add_argument("--peers", default="same,transformer", help="with our weights, and Llama beside Mamba")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens behind it")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    report = Report("generation_gpu", device=torch.cuda.get_device_name())
    report.say(kernels_of_peer())
    bench = Bench(report, arguments)
    for name in arguments.models.split(","):
        bench.one_model(name)
    report.save()


if __name__ == "__main__":
    main()
