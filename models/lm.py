"""The language model: embedding, layers, final norm, head, and the loss in chunks of tokens.

Everything that is carried from one piece of a sequence to the next is in the returned states: hand them to the next call and two
pieces equal the whole; hand them a token at a time and that is decoding.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from baton.kernels.protocol import State
from baton.models import init
from baton.models.block import Layer
from baton.models.config import ModelConfig
from baton.models.mixer import Mixer, Site
from baton.models.norm import RMSNorm
from baton.parallel.sequence import SequenceLink
from baton.parallel.tensor import VocabParallelEmbedding, VocabParallelHead, megatron_config

States = dict[str, State]
"""State of each layer, by the layer's number in the whole model."""

IGNORED = -1
"""The label of a position that does not count."""


class LanguageModel(nn.Module):
    """tokens [B, T] int64, pos [B, T] int32, States or None -> hidden [B, T, d_model] fp32, States.

    tensor_size: ranks of the tensor group this model is split over. compute_dtype: of matmuls and activations between them;
    parameters, the residual stream, step sizes and scan states stay fp32. recompute: keep only each layer's input for backward
    and run the layer again there. link: the neighbours that have the tokens before and after this rank's, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_size: int = 1,
        compute_dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        deterministic_embedding: bool = False,
        link: SequenceLink | None = None,
    ) -> None:
        super().__init__()
        self.link = link
        self.config = config
        self.recompute = recompute
        megatron = megatron_config(tensor_size, deterministic_embedding)
        self.embedding = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.d_model,
            init.normal(0.02),
            megatron,
            compute_dtype=compute_dtype,
            decay=config.decay_embedding,
        )
        site = Site(config.d_model, config.residual_adds, config.norm_eps, megatron, compute_dtype, config.init_std)
        self.layers = nn.ModuleDict({str(n): Layer(names, config, site) for n, names in enumerate(config.layers)})
        for module in self.modules():
            if isinstance(module, Mixer):
                module.link = link
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        if not config.tie_embeddings:
            self.head = VocabParallelHead(
                config.padded_vocab_size,
                config.d_model,
                init.normal(0.02),
                megatron,
                compute_dtype=compute_dtype,
                decay=config.decay_embedding,
            )

    def forward(self, tokens: Tensor, pos: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        x = self.embedding(tokens)
        leaving: States = {}
        for number, layer in self.layers.items():
            entering = None if states is None else states[number]
            if self.recompute and torch.is_grad_enabled():
                # nothing random happens in a layer, so there is no generator's state to restore
                x, leaving[number] = checkpoint(
                    layer,
                    x,
                    pos,
                    entering,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(cast(Layer, layer).recomputation, self.link),
                )
            else:
                x, leaving[number] = layer(x, pos, entering)
        return self.norm(x), leaving

    def alone(self) -> AbstractContextManager[None]:
        """Within it this rank has whole sequences: decoding."""
        return nullcontext() if self.link is None else self.link.alone()

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed negative log-likelihood (nats, fp32 scalar) of labels [B, T] int64; IGNORED ones count nothing.

        Logits exist for `loss_chunk` tokens at a time, in forward and in backward (which makes them again).
        """
        flat_hidden, flat_labels = hidden.flatten(0, 1), labels.flatten()
        total = hidden.new_zeros(())
        for h, y in zip(flat_hidden.split(self.config.loss_chunk), flat_labels.split(self.config.loss_chunk)):
            if torch.is_grad_enabled():
                total = total + checkpoint(self._chunk_loss, h, y, use_reentrant=False, preserve_rng_state=False)
            else:
                total = total + self._chunk_loss(h, y)
        return total

    def _chunk_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.local_logits(hidden)
        nll = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.clamp(min=0))
        return torch.where(labels != IGNORED, nll, 0.0).sum()

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's share of the vocabulary."""
        return self.embedding.head(hidden) if self.config.tie_embeddings else self.head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the whole (padded) vocabulary, fp32, on every tensor rank: [.., d_model] to [.., vocab]. For decoding."""
        return tensor_parallel.gather_from_tensor_model_parallel_region(self.local_logits(hidden)).float()
