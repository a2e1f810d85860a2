"""The language model, or one pipeline stage of it: embedding, layers, final norm, head, and the loss in chunks of tokens.

The returned States hold everything that later tokens need of earlier ones. Pass them to the next call to continue a sequence: the
results of two calls equal those of one call on the whole sequence. Calls with one token each are decoding.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from baton.kernels.protocol import State, StateSpec
from baton.models.block import Layer, SavedForRecomputation, build_block, recomputation
from baton.models.config import ModelConfig
from baton.models.cross_entropy import linear_cross_entropy
from baton.models.forward_context import ForwardContext
from baton.models.mixer_context import MixerContext
from baton.models.norm import RMSNorm, Stream, summed
from baton.models.stages import Stage, single_stage
from baton.parallel.context_parallel import ContextLink
from baton.parallel.param_layout import declare, layout_of
from baton.parallel.pipeline import PipelineLink
from baton.parallel.tensor import VocabParallelEmbedding, VocabParallelHead, megatron_config
from baton.parallel.tensor_group import gather_from_tensor_group, gather_tokens, tokens_per_rank

States = dict[str, State]
"""State of each layer, by the layer's number in the whole model."""


class LanguageModel(nn.Module):
    """tokens [B, T] int64, pos [B, T] int32, States or None -> hidden [B, T, d_model] in the compute type, States.

    Every stage but the first takes the previous stage's hidden vectors instead of tokens; only the last has the final norm and a
    loss. A tied embedding belongs to the first stage, and the last stage reads a replica of it. So do blocks that layers share
    (`shared`), of which every other stage has a replica.

    Args:
        tensor_size: ranks of the tensor group that the model is split over.
        compute_dtype: of matmuls and the activations between them; parameters, step sizes and scan states stay fp32.
        residual_dtype: of the residual stream and of hidden vectors between stages.
        recompute: activations that the backward pass recomputes: "none", "selective" (the cheap ones), or "full" (only each layer's
            input is saved, and the layer runs again).
        link: the context-parallel neighbours, which have the tokens before and after this rank's, or None. Forward passes use it
            unless they are given another context.
        stage: the layers of this rank (None: all).
        pipeline: the previous and the next stage, or None.
        sequence_parallel: tensor ranks share the residual stream and the norms, each a part of the tokens,
            [tokens_per_rank(B T), d_model], which is also what stages send; the last stage's hidden vectors are gathered.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_size: int = 1,
        compute_dtype: torch.dtype = torch.float32,
        residual_dtype: torch.dtype = torch.float32,
        recompute: Literal["none", "states", "selective", "full"] = "none",
        link: ContextLink | None = None,
        stage: Stage | None = None,
        pipeline: PipelineLink | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.stage = stage or single_stage(config)
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
            keep_states=recompute == "none",
        )
        self.shared = nn.ModuleDict(
            {name: build_block(name, first, config, context) for name, first in config.shared_blocks.items()}
        )
        self._tie_over_stages()
        self.layers = nn.ModuleDict(
            {str(n): Layer(config.sub_blocks[n], config, context, dict(self.shared.items())) for n in self.stage.layers}
        )
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

    def _tie_over_stages(self) -> None:
        """Every stage has the blocks that layers share, and the first one owns them."""
        for parameter in self.shared.parameters() if self.stage.count > 1 else ():
            layout, owner = layout_of(parameter), self.stage.first
            declare(parameter, replace(layout, tied_owner=owner, tied_replica=not owner, tied_over="pipeline"))

    @property
    def forward_context(self) -> ForwardContext:
        """The context of a forward pass that is not given another one: through the model's link, with final States."""
        return ForwardContext(self.link)

    def forward(
        self, tokens: Tensor, pos: Tensor, states: States | None = None, forward_context: ForwardContext | None = None
    ) -> tuple[Tensor, States]:
        """forward_context: None: the model's own."""
        context = (forward_context or self.forward_context).of_one_pass()
        stream: Stream = (self.embedding(tokens, self.hidden_dtype) if self.stage.first else tokens, None)
        final_states: States = {}
        for number, layer in self.layers.items():
            initial_state, here = None if states is None else states[number], context.in_layer(number)
            if self.recompute == "full" and torch.is_grad_enabled():
                # layers are deterministic, so there is no RNG state to restore; the summed stream is half as much to save
                x, final_states[number] = checkpoint(
                    cast(Layer, layer).forward_summed,
                    stream[0],
                    pos,
                    initial_state,
                    here,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(recomputation, [layer], context.link),
                )
                stream = x, None
            else:
                stream, final_states[number] = layer(stream, pos, initial_state, here)
        if not self.stage.last:
            return summed(stream), final_states
        _, hidden = self.norm(stream, self.compute_dtype)
        return gather_tokens(hidden, pos.shape) if self.sequence_parallel else hidden, final_states

    def recomputation(
        self, link: ContextLink | None, saved: SavedForRecomputation | None = None
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Python contexts of a first forward pass, which may run without a graph, and of its recomputation, which gets the same
        initial States, makes the same discrete choices, and communicates with no other context-parallel rank.

        link: of both. saved: by the first pass. A context is for one pass; others with the same `saved` are for more.
        """
        first, again = recomputation(self.layers.values(), link, saved)
        return first, again

    @property
    def state_specs(self) -> dict[str, tuple[StateSpec, ...]]:
        """The State of a sequence in each layer, in whole shapes, by the layer's number."""
        return {number: cast(Layer, layer).state_specs for number, layer in self.layers.items()}

    @torch.no_grad()
    def through_stages(
        self, tokens: Tensor, pos: Tensor, states: States | None = None, forward_context: ForwardContext | None = None
    ) -> tuple[Tensor | None, States]:
        """The forward pass through all stages without gradients: hidden vectors on the last stage, else None; own States."""
        pipeline = self.pipeline
        if pipeline is None:
            return self(tokens, pos, states, forward_context)
        x = tokens if pipeline.first else pipeline.irecv("forward", self.hidden_shape(tokens), self.hidden_dtype).wait()
        hidden, final_states = self(x, pos, states, forward_context)
        if pipeline.last:
            return hidden, final_states
        pipeline.send("forward", hidden)
        return None, final_states

    def hidden_shape(self, tokens: Tensor) -> tuple[int, ...]:
        """Shape of the hidden vectors that stages send for tokens [B, T]."""
        rows = (tokens_per_rank(tokens.numel(), self.tensor_size),) if self.sequence_parallel else tokens.shape
        return (*rows, self.config.d_model)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the residual stream and of hidden vectors between stages: residual_dtype, or the parameters' dtype for fp32."""
        return self._hidden_dtype if self._hidden_dtype != torch.float32 else next(self.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        assert self.config.vocab_size is not None, "a model that was built knows its vocabulary"
        return self.config.vocab_size

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed negative log-likelihood (nats, fp32 scalar) of labels [B, T] int64; negative ones are ignored.

        Logits exist for `loss_chunk` tokens at a time; gradients are computed in the forward pass (models.cross_entropy).
        """
        head = self.embedding if self.config.tie_embeddings else self.head
        return linear_cross_entropy(
            hidden.flatten(0, 1).to(self.compute_dtype),
            head.weight,
            head.cast_weight(),
            labels.flatten(),
            vocab_size=self.vocab_size,
            chunk=self.config.loss_chunk,
            sum_gradient=not self.sequence_parallel,
        )

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's share of the vocabulary."""
        return self.embedding.head(hidden) if self.config.tie_embeddings else self.head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the whole (padded) vocabulary, fp32, on every tensor rank: [.., d_model] to [.., vocab]. For decoding."""
        return gather_from_tensor_group(self.local_logits(hidden)).float()
