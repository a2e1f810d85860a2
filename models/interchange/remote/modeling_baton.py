"""A language model trained with Baton, for transformers. Its cache is the recurrent State of every layer."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from baton.models.interchange.remote.configuration_baton import BatonConfig
from baton.models.interchange.remote.layers_baton import State, precise, rms_norm
from baton.models.interchange.remote.mixers_baton import MIXERS


class BatonCache:
    """What later tokens need of earlier ones.

    Attributes:
        states: State of each sub-block, by its name in the model.
        next_pos: position of each row's next token, [batch].
        tokens: tokens read so far, padding included.
    """

    def __init__(self, states: dict[str, State], next_pos: Tensor, tokens: int) -> None:
        self.states, self.next_pos, self.tokens = states, next_pos, tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far."""
        return self.tokens

    def reorder_cache(self, beam_idx: Tensor) -> "BatonCache":
        """The rows of beam_idx."""
        states = {place: {name: x[beam_idx] for name, x in state.items()} for place, state in self.states.items()}
        self.states, self.next_pos = states, self.next_pos[beam_idx]
        return self


class Parameters(nn.Module):
    """Parameters by dotted names, whose parts are modules."""

    def __init__(self, shapes: Mapping[str, list[int]]) -> None:
        super().__init__()
        inner: dict[str, dict[str, list[int]]] = {}
        for name, shape in shapes.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = shape
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for name, below in inner.items():
            self.add_module(name, Parameters(below))


class Norm(nn.Module):
    """RMSNorm, in float32."""

    def __init__(self, config: BatonConfig) -> None:
        super().__init__()
        self.eps, self.weight = config.norm_eps, nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class BatonBlock(nn.Module):
    """mixer(norm(x)), to be added to x. Of a sub-block's mixers the first has the norm."""

    def __init__(self, config: BatonConfig, name: str, first: bool) -> None:
        super().__init__()
        self.settings, self.eps = config.mixers[name], config.norm_eps
        self.norm = Norm(config) if first else None
        self.mixer = Parameters(self.settings["parameters"])

    def forward(
        self, x: Tensor, pos: Tensor, state: State | None, dtype: torch.dtype, shared: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, State]:
        """norm(x), the mixer's output and State. x [batch, tokens, width]: in float32, or for a mixer that is not the first norm(x)
        itself; dtype: of the mixer's matrix products; shared: what layers hand on in this pass."""
        normed = x if self.norm is None else self.norm(x).to(dtype)
        parameters = dict(self.mixer.named_parameters())
        settings = {**self.settings, "shared": shared}
        return normed, *MIXERS[self.settings["kind"]](parameters, settings, normed, pos, state, self.eps)


class BatonForCausalLM(PreTrainedModel, GenerationMixin):
    """input_ids [batch, tokens] -> logits [batch, tokens, vocab_size] in float32.

    Zeros of attention_mask are padding in front of a row (padding_side="left"); the State of a row does not depend on it. Packed
    documents are told apart by position_ids, which begin again at 0.
    """

    config_class = BatonConfig
    base_model_prefix = "baton"
    _no_split_modules = ["BatonBlock"]  # noqa: RUF012
    # rounded to bfloat16 these would give another recurrence
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "norm", "A_log", "B", "C", "D", "dt_bias", "beta_bias", "decay_bias", "step_bias", "forget_bias", "S0", "conv_weight",
        "conv_weights", "conv_bias", "gate_bias", "bc_conv_weight", "bc_conv_bias", "conv_q", "conv_k", "conv_q_bias",
        "conv_k_bias", "qkv_bias", "q_norm", "k_norm", "sinks", "bound", "shift_mix", "rate_bias", "residual_bias", "k_k", "k_a",
        "r_k", "bonus", "norm_weight", "norm_bias", "input_gate_bias", "forget_gate_bias",
        "dt_norm", "B_norm", "C_norm", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o",
        "W_a", "W_x", "b_a", "b_x", "Lambda",
        "log_dt", "A_imag", "token_scale", "inner_norm_weight", "inner_norm_bias", "W1", "b1", "W2", "b2",
    ]  # fmt: skip

    def __init__(self, config: BatonConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.shared = nn.ModuleDict({name: BatonBlock(config, name, first) for name, first in config.shared.items()})
        self.layers = nn.ModuleList()
        for blocks in config.layers:
            places = [(name, n == 0) for names in blocks for n, name in enumerate(names.split("|"))]
            own = {name: BatonBlock(config, name, first) for name, first in places if name not in config.shared}
            self.layers.append(nn.ModuleDict(own))
        self.norm = Norm(config)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.ones_(parameter)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: BatonCache | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """labels: input_ids with -100 where nothing is to be predicted; they are shifted here. logits_to_keep: of the last tokens,
        as many; 0: all."""
        past, length = past_key_values, input_ids.shape[1]
        if position_ids is None:
            pos = self._positions(input_ids, attention_mask, past)
        else:
            pos = self._given_positions(position_ids.expand_as(input_ids).to(torch.int32), attention_mask, past)
        x = precise(self.embedding(input_ids))
        dtype, states = self.embedding.weight.dtype, {}
        shared: dict[str, Tensor] = {}
        for number, layer in enumerate(self.layers):
            blocks = {**self.shared, **cast(nn.ModuleDict, layer)}
            for names in self.config.layers[number]:
                given, outputs = x, []
                for name in names.split("|"):
                    place = f"{number}.{name}"
                    block, state = blocks[name], None if past is None else past.states[place]
                    given, y, states[place] = block(given, pos, state, dtype, shared)
                    outputs.append(y)
                x = x + reduce(add, outputs)
        hidden = self.norm(x[:, -logits_to_keep:]).to(dtype)
        logits = precise(F.linear(hidden, self.embedding.weight if self.config.tie_word_embeddings else self.head.weight))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        tokens = length + (0 if past is None else past.tokens)
        cache = BatonCache(states, pos[:, -1] + 1, tokens) if use_cache is not False else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    @staticmethod
    def _positions(input_ids: Tensor, attention_mask: Tensor | None, past: BatonCache | None) -> Tensor:
        """Of each token in its row's text; padding in front has position 0, as the first token has, which resets the States."""
        batch, length = input_ids.shape
        if past is not None:
            return past.next_pos[:, None] + torch.arange(length, dtype=torch.int32, device=input_ids.device)
        if attention_mask is None:
            return torch.arange(length, dtype=torch.int32, device=input_ids.device).expand(batch, -1)
        return (attention_mask.cumsum(1) - 1).clamp(min=0).to(torch.int32)

    @staticmethod
    def _given_positions(pos: Tensor, attention_mask: Tensor | None, past: BatonCache | None) -> Tensor:
        """Those of the caller, 0 for padding, of which each is 0 or one more than the one before it: a State cannot skip tokens."""
        if attention_mask is not None and past is None:
            pos = pos.masked_fill(attention_mask == 0, 0)
        before = pos[:, :1] - 1 if past is None else past.next_pos[:, None].to(pos) - 1
        before = torch.cat((before, pos[:, :-1]), dim=1)
        wrong = ((pos != 0) & (pos != before + 1)).nonzero().tolist()
        if wrong:
            row, token = wrong[0]
            raise ValueError(
                f"position_ids: row {row}, token {token} has position {pos[row, token]} after {before[row, token]}; a position is "
                "one more than that of the token before it, or 0 where a document begins"
            )
        return pos

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: BatonCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        **_: Any,
    ) -> dict[str, Any]:
        """The tokens that the cache has not read."""
        unread = input_ids if past_key_values is None else input_ids[:, past_key_values.tokens :]
        mask = attention_mask if past_key_values is None else None
        found = {"input_ids": unread, "attention_mask": mask, "past_key_values": past_key_values, "use_cache": use_cache}
        return {**found, "logits_to_keep": 1}
