"""Drop-in for mamba_ssm's `selective_scan_fn`, with an initial state and document boundaries.

Arguments, order and layouts are those of `mamba_ssm.ops.selective_scan_interface.selective_scan_fn`: time is the last dimension.
The computation is `op.selective_scan`, which has time as the second dimension and so needs no copies; prefer it in new code.
"""

import torch
from torch import Tensor

from baton.kernels.errors import KernelError
from baton.kernels.selective_scan.op import selective_scan

_KERNEL = "selective_scan_fn"


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Tensor | None = None,
    pos: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba's recurrence (Gu & Dao 2023, Algorithm 2), with the signature of mamba_ssm:

        h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t,    out_t = (C_t h_t + D u_t) silu(z_t)

    Args:
        u, delta, z: [batch, dim, seqlen]. z None: the output is not gated.
        A: [dim, dstate], real and negative.
        B, C: [batch, dstate, seqlen] or [batch, groups, dstate, seqlen]; each group serves dim / groups consecutive channels.
        D, delta_bias: [dim]. None: zero.
        delta_softplus: whether the step sizes are softplus(delta + delta_bias) instead of delta + delta_bias.
        return_last_state: also return the state after the last token.
        initial_state: [batch, dim, dstate], float32 (float64 for float64 inputs). None: zero. Not in mamba_ssm.
        pos: position of each token in its document, int32 or int64 [batch, seqlen]; the state is reset where it is 0. None: one
            document. Not in mamba_ssm.

    Returns:
        out [batch, dim, seqlen] in u's dtype, and with return_last_state the state [batch, dim, dstate], float32 or float64. Unlike
        mamba_ssm's, the state carries a gradient, and gradients reach the initial state.

    Raises:
        KernelError: complex A; B or C that do not depend on time, [dim, dstate]; otherwise as `op.selective_scan`.
    """
    if A.is_complex():
        raise KernelError(f"{_KERNEL}: A has dtype {A.dtype}, expected a real dtype")
    for name, x in (("B", B), ("C", C)):
        if x.dim() not in (3, 4):
            raise KernelError(
                f"{_KERNEL}: {name} has shape {tuple(x.shape)}, expected (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)"
            )
    B, C = (x.unsqueeze(1) if x.dim() == 3 else x for x in (B, C))
    dim, groups = u.shape[1], B.shape[1]
    if C.shape[1] != groups or dim % groups:
        raise KernelError(f"{_KERNEL}: B has {groups} groups and C has {C.shape[1]}, expected one number that divides dim={dim}")
    if D is None:
        D = u.new_zeros(dim, dtype=torch.float64 if u.dtype == torch.float64 else torch.float32)
    outs, states = [], []
    for group in range(groups):
        own = slice(group * dim // groups, (group + 1) * dim // groups)
        out, state = selective_scan(
            u[:, own].transpose(1, 2),
            delta[:, own].transpose(1, 2),
            A[own],
            B[:, group].transpose(1, 2),
            C[:, group].transpose(1, 2),
            D[own],
            z=None if z is None else z[:, own].transpose(1, 2),
            dt_bias=None if delta_bias is None else delta_bias[own],
            dt_softplus=delta_softplus,
            pos=pos,
            initial_state=None if initial_state is None else initial_state[:, own],
        )
        outs.append(out.transpose(1, 2))
        states.append(state)
    out, state = (outs[0], states[0]) if groups == 1 else (torch.cat(outs, dim=1), torch.cat(states, dim=1))
    return (out, state) if return_last_state else out
