"""S4D's recurrence as one loop over tokens: the definition."""

import torch
from torch import Tensor


def s4d_reference(
    x: Tensor, log_decay: Tensor, angle: Tensor, C: Tensor, *, pos: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gu et al. 2022 (arXiv:2206.11893), a discretized diagonal state space model; as `op.s4d`. Nothing is checked.

    h_t = exp(log_decay + i angle) h_{t-1} + x_t        y_t = 2 Re <C, h_t>

    Complex numbers are pairs of real ones. Where pos is 0, h_{t-1} counts as 0.
    """
    decay_DN = log_decay.exp()
    real_DN, imag_DN = decay_DN * angle.cos(), decay_DN * angle.sin()
    h_BDN2 = x.new_zeros(x.shape[0], *C.shape) if initial_state is None else initial_state
    y_BTD = []
    for t in range(x.shape[1]):
        if pos is not None:
            h_BDN2 = h_BDN2.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
        re_BDN, im_BDN = h_BDN2.unbind(-1)
        input_BD1 = x[:, t, :, None]
        h_BDN2 = torch.stack((real_DN * re_BDN - imag_DN * im_BDN + input_BD1, real_DN * im_BDN + imag_DN * re_BDN), dim=-1)
        y_BTD.append(2 * (C[..., 0] * h_BDN2[..., 0] - C[..., 1] * h_BDN2[..., 1]).sum(-1))
    return torch.stack(y_BTD, dim=1), h_BDN2
