"""The language model, or one pipeline stage of it: embedding, layers, final norm, head, and the loss in chunks of tokens.

Everything that is carried from one piece of a sequence to the next is in the returned states: hand them to the next call and two
pieces equal the whole; hand them a token at a time and that is decoding.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from baton.kernels.protocol import State, StateSpec
from baton.models.block import Layer, recomputation
from baton.models.config import ModelConfig
from baton.models.cross_entropy import linear_cross_entropy
from baton.models.mixer import Mixer
from baton.models.mixer_context import MixerContext
from baton.models.norm import RMSNorm, Stream, summed
from baton.models.stages import Stage, whole
from baton.parallel.context_parallel import ContextLink
from baton.parallel.param_layout import declare, layout_of
from baton.parallel.pipeline import PipelineLink
from baton.parallel.tensor import (
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_from_tensor_group,
    gather_tokens,
    megatron_config,
    tokens_per_rank,
)

States = dict[str, State]
"""State of each layer, by the layer's number in the whole model."""


class LanguageModel(nn.Module):
    """tokens [B, T] int64, pos [B, T] int32, States or None -> hidden [B, T, d_model] in the compute type, States.

    A stage takes the hidden vectors that the stage before returned in the place of tokens, unless it is the first; only the last
    one has the final norm and a loss. A tied embedding belongs to the first stage; the last one reads a copy that it is lent.

    tensor_size: ranks of the tensor group this model is split over. compute_dtype: of matmuls and activations between them;
    parameters, step sizes and scan states stay fp32. residual_dtype: of the residual stream and of what goes from stage to stage.
    recompute: activations that the backward pass recomputes: "none", "selective" (those that are cheap), or "full" (only each
    layer's input is kept, and the layer runs again). link: the neighbours that have the tokens before and after this rank's, or
    None. stage: which layers this rank has (None: all); pipeline: the stages before and after it, or None. sequence_parallel:
    tensor ranks share the residual stream and the norms, each a part of the tokens, [tokens_per_rank(B T), d_model]: such a part
    goes from stage to stage. The last stage's hidden vectors are gathered.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_size: int = 1,
        compute_dtype: torch.dtype = torch.float32,
        residual_dtype: torch.dtype = torch.float32,
        recompute: Literal["none", "selective", "full"] = "none",
        link: ContextLink | None = None,
        stage: Stage | None = None,
        pipeline: PipelineLink | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.stage = stage or whole(config)
        self.link, self.pipeline = link, pipeline
        self.config = config
        self.recompute = recompute
        self.tensor_size, self.compute_dtype, self._hidden_dtype = tensor_size, compute_dtype, residual_dtype
        self.sequence_parallel = sequence_parallel and tensor_size > 1
        megatron = megatron_config(tensor_size)
        if self.stage.first or (self.stage.last and config.tie_embeddings):
            embedding = config.embedding
            vocab_size, width = embedding.shape
            self.embedding = VocabParallelEmbedding(
                vocab_size,
                width,
                embedding.init,
                megatron,
                compute_dtype=compute_dtype,
                decay=embedding.decay,
                scatter=self.sequence_parallel,
            )
            if config.tie_embeddings and self.stage.count > 1:
                layout = layout_of(self.embedding.weight)
                declare(self.embedding.weight, replace(layout, tied_owner=self.stage.first, tied_replica=self.stage.last))
        context = MixerContext(
            config.d_model,
            config.residual_adds,
            config.norm_eps,
            megatron,
            compute_dtype,
            config.init_std,
            sequence_parallel=self.sequence_parallel,
            selective_recompute=recompute == "selective",
        )
        self.layers = nn.ModuleDict({str(n): Layer(config.layers[n], config, context) for n in self.stage.layers})
        for name, module in self.named_modules():
            if isinstance(module, Mixer):
                module.link, module.where = link, name.replace(".mixer", "")
        if not self.stage.last:
            return
        self.norm = RMSNorm(config.final_norm, context)
        if head := config.head:
            vocab_size, width = head.shape
            self.head = VocabParallelHead(
                vocab_size,
                width,
                head.init,
                megatron,
                compute_dtype=compute_dtype,
                decay=head.decay,
                disable_grad_reduce=self.sequence_parallel,
            )

    def forward(
        self, tokens: Tensor, pos: Tensor, states: States | None = None, state_wanted: bool = True
    ) -> tuple[Tensor, States]:
        """state_wanted: whether the States that leave will be taken; else they are not made, and what is returned in their place
        refuses (baton.kernels.protocol.absent_state), but where a link has handed them on."""
        stream: Stream = (self.embedding(tokens, self.hidden_dtype) if self.stage.first else tokens, None)
        leaving: States = {}
        for number, layer in self.layers.items():
            entering = None if states is None else states[number]
            if self.recompute == "full" and torch.is_grad_enabled():
                # nothing random happens in a layer, so there is no generator's state to restore
                # one part, of which half as much is kept
                x, leaving[number] = checkpoint(
                    cast(Layer, layer).whole,
                    stream[0],
                    pos,
                    entering,
                    state_wanted,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(recomputation, [layer], self.link),
                )
                stream = x, None
            else:
                stream, leaving[number] = layer(stream, pos, entering, state_wanted)
        if not self.stage.last:
            return summed(stream), leaving
        _, hidden = self.norm(stream, self.compute_dtype)
        return gather_tokens(hidden, pos.shape) if self.sequence_parallel else hidden, leaving

    def recomputation(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of a first forward pass, which need not have a graph, and of its recomputation, which takes the same entering
        States and makes the same choices as that, and exchanges nothing with other sequence ranks."""
        first, again = recomputation(self.layers.values(), self.link)
        return first, again

    @property
    def state_specs(self) -> dict[str, tuple[StateSpec, ...]]:
        """What each layer carries per sequence, in whole shapes, by the layer's number."""
        return {number: cast(Layer, layer).state_specs for number, layer in self.layers.items()}

    @torch.no_grad()
    def through_stages(
        self, tokens: Tensor, pos: Tensor, states: States | None = None, state_wanted: bool = True
    ) -> tuple[Tensor | None, States]:
        """The forward pass of all stages, without gradients: hidden vectors on the last one and None on the others, own States."""
        pipeline = self.pipeline
        if pipeline is None:
            return self(tokens, pos, states, state_wanted)
        x = tokens if pipeline.first else pipeline.irecv("forward", self.hidden_shape(tokens), self.hidden_dtype).wait()
        hidden, leaving = self(x, pos, states, state_wanted)
        if pipeline.last:
            return hidden, leaving
        pipeline.send("forward", hidden)
        return None, leaving

    def hidden_shape(self, tokens: Tensor) -> tuple[int, ...]:
        """Of what goes from stage to stage for tokens [B, T]."""
        rows = (tokens_per_rank(tokens.numel(), self.tensor_size),) if self.sequence_parallel else tokens.shape
        return (*rows, self.config.d_model)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of the same, and of the residual stream: less precise than parameters only where that is asked for."""
        return self._hidden_dtype if self._hidden_dtype != torch.float32 else next(self.parameters()).dtype

    def local_only(self) -> AbstractContextManager[None]:
        """Within it this rank has whole sequences: decoding."""
        return nullcontext() if self.link is None else self.link.local_only()

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed negative log-likelihood (nats, fp32 scalar) of labels [B, T] int64; IGNORE_INDEX ones count nothing.

        Logits exist for `loss_chunk` tokens at a time, once: what gets a gradient has it made in the forward pass.
        """
        head = self.embedding if self.config.tie_embeddings else self.head
        return linear_cross_entropy(
            hidden.flatten(0, 1).to(self.compute_dtype),
            head.weight,
            head.cast_weight(),
            labels.flatten(),
            chunk=self.config.loss_chunk,
            sum_gradient=not self.sequence_parallel,
        )

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's share of the vocabulary."""
        return self.embedding.head(hidden) if self.config.tie_embeddings else self.head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the whole (padded) vocabulary, fp32, on every tensor rank: [.., d_model] to [.., vocab]. For decoding."""
        return gather_from_tensor_group(self.local_logits(hidden)).float()
