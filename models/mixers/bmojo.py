"""B'MOJO's mixer: a state space model, and one attention over a window of tokens, the state space model's outputs (fading tokens)
and the tokens that it predicted worst (eidetic tokens).

Source: Zancato et al. 2024, "B'MOJO: Hybrid State Space Realizations of Foundation Models with Eidetic and Fading Memory",
Algorithm 1 in its chunked form. There is no position encoding.

The state space model is split over the tensor group by channel, and the attention by head. The state space model's output is
all-reduced before tokens are scored, so that every rank computes the same scores and keeps the same tokens.

Keys and values first pass a causal convolution of d_conv tokens each, which the paper does not describe. In Algorithm 1 as printed
(d_conv=null) the layer has no information about the order of the tokens in a window: only the state space model's outputs depend on
it, and they are attended from the next multiple of the window on. Until then the layer cannot associate keys with values. Two such
layers alone learn multi-query associative recall slowly and in part: 72 % of 12 pairs after 2000 steps, against 99 % with the
convolutions (an H100, commit 87baea9; `baton experiment bmojo-figure-2` measures it again) and close to 100 % in the paper's figure
2. A preceding layer that mixes neighbouring tokens, such as Mamba, helps.

The paper does not say whether a layer also has an MLP. The output is an average of values: without an MLP nothing is computed of a
token alone, for which Mamba has its gate. Of equal parameters, two layers with a SwiGLU each end at 3.53 nats a token on text after
500 steps (3.48 with fading=sliding), four layers without at 4.16, six of Mamba at 3.25 (`baton experiment bmojo-block`). 130
million parameters without MLPs diverged at a learning rate of 1e-3 (benchmarks/results/shoot_out_bmojo_without_mlps.log), and with
MLPs they did after 283 steps, from a loss of 3.4 (benchmarks/results/shoot_out_bmojo.log). The models in configs/models have MLPs.
With fading_norm, which the paper lacks, what is attended and scored of the state space model has a root mean square of 1. The same
model then learned its 100 million tokens without a spike, to 1.73 nats a token (docs/shoot-out.md); so it is the default. In
small models, which do not diverge, it changes little: 3.56 nats for those two layers. The experiments in docs/reproduced have the
paper's form, fading_norm=false, unless a cell says otherwise.

Without eidetic tokens (B'MOJO-F) two layers alone recall little, also with the convolutions; in the paper's figure they recall more
than Mamba. A fading token is C_s h_s, read from the state with the C of its own time s and not with the query's: a query weighs a
few such vectors, and does not choose what is read from the state, as Mamba's does. With add_ssm_output, which the paper lacks, each
token's own output of the state space model is added to the attention's. Small experiments (docs/reproduced, bmojo-next-token and
bmojo-figure-2-small): after 200 steps on text two layers end at 4.93 nats a token, with add_ssm_output at 4.30, Mamba at 4.24; of 2
pairs B'MOJO-F recalls 58 %, with add_ssm_output 81 %, Mamba 53 %; with more pairs all three guess. It is off by default: no larger
model has been trained with it, and a default would also change the runs that began without the setting.

The paper does not specify the following, and settings decide it: the sizes of the memories, the number and the weights of the
outputs that the predictor averages, and the norm of its error. The paper does not specify the following either, and this code fixes
it:

- The output of Mamba's whole mixer, gated and projected to d_model, is scored and is the fading token; Algorithm 1 writes C x.
- The eidetic memory keeps the tokens with the largest scores so far, and of equal ones the older; the algorithm has no eviction.
- A token that is both in the window and in the memory is attended twice, as in the paper's interleaved form.

Differences from Algorithm 1: the memories are updated at multiples of the window and are constant for one window, as in the paper's
chunked form. Only a chunk's last token then has y_{t-w} as its newest fading token. With fading=sliding every token does, and
attends to the w - 1 outputs before that one too; the eidetic memory still changes once per window. No setting computes the
algorithm token by token. A document that is no longer than the window never uses the memories, and gives the state space model no
gradient.

The paper claims that B'MOJO trains faster than Mamba at all sizes. Here a stack of the mixer alone trained 0.91 times as many
tokens per second at 1.4B (docs/measured.md); a stack with MLPs has not been measured.

Misprints in the paper: the speed-up is 10 % in one place and 15 % in another; appendix E lacks D u_t in Mamba's output; the second
form of C.3 has u_{t-1} for u_t; table 3 writes 1 and 100 for the same accuracy.

Shapes: B batch, T time, M d_model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baton.kernels.eidetic_attention.recurrence import EideticAttention, Innovation
from baton.kernels.protocol import State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.mixers.mamba import Mamba
from baton.models.norm import unweighted
from baton.models.settings.bmojo import BMojoConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from baton.parallel.tensor_group import copy_to_tensor_group, own_tokens

_CONV = ShortConv(None)


class BMojo(Mixer, settings=BMojoConfig):
    """x [B, T, M], pos [B, T], State {ssm.*, y [B, predictor, M], conv_k, conv_v [B, d_conv - 1, kv_heads * head_dim] unless
    d_conv is null, and eidetic_attention's} -> y [B, T, M], State."""

    # recomputed scores may round differently and select other tokens, and gradients would then be those of another function
    recompute_keeps = (torch.ops.baton.innovation.default,)

    config: BMojoConfig
    ssm: Mamba
    q_proj: ColumnParallelLinear
    kv_proj: ColumnParallelLinear
    conv_weights: nn.ParameterDict
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config = self.config
        ssm_state = tail = attention_state = None
        if state is not None:
            ssm_state = {name.removeprefix("ssm."): x for name, x in state.items() if name.startswith("ssm.")}
            others = ("ssm.", "conv_")
            attention_state = {name: x for name, x in state.items() if name != "y" and not name.startswith(others)}
            tail = {"y": state["y"]}
        fading_BTM, ssm_state = self.ssm(x_BTM, pos_BT, ssm_state, forward_context)
        if config.fading_norm:
            precise, dtype = self.out_proj.weight.dtype, fading_BTM.dtype
            fading_BTM = unweighted(fading_BTM, self.context.norm_eps, precise=precise, dtype=dtype)
        # weights of the previous outputs, nearest first
        weights = self._predictor_weights(fading_BTM.device)
        score_BT, tail = self.run_recurrence(
            Innovation(config.innovation_norm), (fading_BTM.detach(), weights), pos_BT, tail, forward_context
        )
        q = self.q_proj(x_BTM).unflatten(-1, (-1, config.head_dim))
        if self.context.sequence_parallel:
            # gradients of what a rank computes are partial: gathering x sums the one of x, and this the one of the fading tokens
            fading_BTM = copy_to_tensor_group(fading_BTM)
        tokens, convs = self._convolved(self._keys_and_values(x_BTM), pos_BT, state, forward_context)
        inputs = (q, *self._by_head(tokens), *self._by_head(self._keys_and_values(fading_BTM)), score_BT)
        attention = EideticAttention(config.window, config.n_fading, config.eidetic, config.fading == "sliding")
        y, attention_state = self.run_recurrence(attention, inputs, pos_BT, attention_state, forward_context)
        final_state = {**{f"ssm.{name}": x for name, x in ssm_state.items()}, **convs, **tail, **attention_state}
        output = self.out_proj(y.flatten(2))
        if config.add_ssm_output:
            output = output + (own_tokens(fading_BTM) if self.context.sequence_parallel else fading_BTM)
        return output, final_state

    def _predictor_weights(self, device: torch.device) -> Tensor:
        n = self.config.predictor
        if self.config.predictor_weights == "uniform":
            return cached_constants.full(n, 1 / n, torch.float32, device)
        return cached_constants.geometric_weights(n, device)

    def _keys_and_values(self, x_BTM: Tensor) -> Sequence[Tensor]:
        return self.kv_proj(x_BTM, self.kv_proj.local_splits)

    def _convolved(
        self, rows: Sequence[Tensor], pos_BT: Tensor, state: State | None, forward_context: ForwardContext
    ) -> tuple[Sequence[Tensor], State]:
        """The convolved keys and values of the tokens, and the final tails."""
        if self.config.d_conv is None:
            return rows, {}
        convolved, final_state = [], {}
        for (name, weight), x_BTD in zip(self.conv_weights.items(), rows, strict=True):
            key, bias = f"conv_{name}", cached_constants.zeros(len(weight), weight.dtype, weight.device)
            y_BTD, tail = self.run_recurrence(
                _CONV, (x_BTD, weight, bias), pos_BT, None if state is None else {"conv": state[key]}, forward_context
            )
            convolved.append(y_BTD)
            final_state[key] = tail["conv"]
        return convolved, final_state

    def _by_head(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [x_BTD.unflatten(-1, (-1, self.config.head_dim)) for x_BTD in rows]
