"""Lattice's recurrence: the public function. Checks the arguments and picks an implementation.

The state is passed in and returned in fp32 (float64 for float64 inputs), with exact gradients to both. A sequence may be split
anywhere: outputs, states and gradients agree to rounding. There is no zero state: before anything is read, the state is S0.
"""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.lattice.chunked import Options, apply_limits, initial_slots, lattice_chunked
from baton.kernels.lattice.triton_launch import lattice_triton, use_triton
from baton.kernels.lattice.variant import VARIANTS, UpdateRule, Variant, slot_norms

_KERNEL = "lattice"


def lattice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    S0: Tensor,
    *,
    mu: Tensor | None = None,
    tau: Tensor | None = None,
    variant: Variant = "dec",
    project: bool = True,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lattice's recurrence over a segment of a sequence (Karami & Mirrokni 2025, equations 7, 10 and 12 to 18). Per head the state
    is a matrix S [d, m] whose columns s_i are slots of norm rho_i and direction phi_i = s_i / rho_i, Phi = [phi_1 ... phi_m]:

        u_i = mu s_i - (gamma c_i / rho_i) (h - phi_i (phi_i . h))        h, c = Phi k - v, k            for "dec"
        S_t = [x_1 ... x_m],   x_i = u_i / |u_i| if project, else u_i            v, Phi^T v - k          for "enc"
        y_t = S_t q                                                              -v, k                   for "sim"

    Where pos == 0, S0 replaces the previous state. The losses of "dec" and "enc" are squares without a factor of 1/2 (equation 5),
    so their gradients have a factor of 2, which equations 7 and 10 and this function leave to gamma. The gradient of "sim" has
    none.

    With projection every slot has norm 1 after every step. The recurrence is then defined on the directions of the initial slots
    and of S0's: their norms have no effect, and gradients to them have no component along them. A common scale of a step's two
    terms cancels, so (mu, gamma) is equivalent to (1, gamma / mu); mu is clamped to at least 1e-3. Without projection slots grow,
    |u|^2 = mu^2 |s|^2 + |u - mu s|^2, unless they are forgotten; rho is clamped to at least 1e-3.

    A threshold tau maps u to sign(u) max(|u| - tau, 0), elementwise (equations 17 and 18), before the projection if there is one.
    Both together are the minimizer of |x - u|^2 / 2 + tau |x|_1 among x of norm 1. Where every entry would vanish, that minimizer,
    and the result here, is the unit vector of u's largest entry with its sign (it is constant and has no gradient).

    Args:
        q: queries, [batch, T, heads, m].
        k: latent codes, a weight for each slot, [batch, T, heads, m].
        v: values, [batch, T, heads, d], d at least m.
        gamma: step sizes, at least 0, no unit, [batch, T, heads]; not checked.
        S0: the state before anything is read, [heads, d, m]; columns should be orthonormal and must not be zero (checked on a CPU).
        mu: forget gates, 0 to 1, no unit, [batch, T, heads]; not checked. None: nothing is forgotten.
        tau: thresholds, at least 0, in the unit of a slot's entries, [batch, T, heads]; not checked. None: no thresholds.
        variant: "dec", "enc" or "sim": whether a step descends |Phi k - v|^2, |Phi^T v - k|^2 or -(Phi^T v) . k.
        project: whether slots are normalized to the unit sphere (equation 14).
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts in this segment.
        initial_state: [batch, heads, d, m], float32 (float64 for float64 inputs). None: S0. With projection no slot may be zero in
            a lane that does not begin with a document start (checked on a CPU).

    Tensors are all float64, or any mix of float32, bfloat16 and float16; the mix is computed in float32.

    Returns:
        y, [batch, T, heads, d] in q's dtype, and the final state, [batch, heads, d, m], float32 or float64. Both carry exact
        gradients to every tensor argument (S0's is the sum over all uses). Double backward is not supported; autograd raises a
        RuntimeError.

    Raises:
        KernelError: an argument has another shape, dtype or device than stated, by name; T = 0; m > d; an unknown variant; a slot
            of zeros.
    """
    if variant not in VARIANTS:
        raise KernelError(f"{_KERNEL}: variant is {variant!r}, expected one of {VARIANTS}")
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, heads, m)")
    device = q.device
    expect_tensor(_KERNEL, "q", q, ("batch", "T", "heads", "m"), (-1, -1, -1, -1), device)
    batch, length, heads, m = q.shape
    expect_tensor(_KERNEL, "k", k, ("batch", "T", "heads", "m"), (batch, length, heads, m), device)
    expect_tensor(_KERNEL, "v", v, ("batch", "T", "heads", "d"), (batch, length, heads, -1), device)
    d = v.shape[3]
    if m > d:
        raise KernelError(f"{_KERNEL}: q has m = {m} but v has d = {d}, expected m <= d: slots begin orthonormal")
    expect_tensor(_KERNEL, "S0", S0, ("heads", "d", "m"), (heads, d, m), device)
    scalars = {"gamma": gamma}
    scalars.update((name, x) for name, x in (("mu", mu), ("tau", tau)) if x is not None)
    for name, x in scalars.items():
        expect_tensor(_KERNEL, name, x, ("batch", "T", "heads"), (batch, length, heads), device)
    compute_dtype = expect_one_precision(_KERNEL, q=q, k=k, v=v, S0=S0, **scalars)
    if initial_state is not None:
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "heads", "d", "m"), (batch, heads, d, m), device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (compute_dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    # on a GPU this would synchronize in every layer
    if device.type == "cpu":
        _expect_slots("S0", S0)
        if initial_state is not None and project:
            seen = initial_state if pos is None else initial_state[pos[:, 0] != 0]
            _expect_slots("initial_state", seen)
    rule = UpdateRule(variant, project)
    if use_triton(q, compute_dtype, sparse=tau is not None):
        options = Options(rule, mu is not None, False)
        inputs = apply_limits(options, (q, k, v, gamma, *(() if mu is None else (mu,)), S0))
        S = initial_slots(options, inputs, pos, initial_state)
        return lattice_triton(q, k, v, gamma, inputs[-1], mu=None if mu is None else inputs[4], rule=rule, pos=pos, S=S)
    return lattice_chunked(q, k, v, gamma, S0, mu=mu, tau=tau, rule=rule, pos=pos, initial_state=initial_state)


def _expect_slots(name: str, S: Tensor) -> None:
    if (slot_norms(S) == 0).any():
        raise KernelError(f"{_KERNEL}: {name} holds a slot of zeros, expected directions: where nothing was read, the state is S0")
