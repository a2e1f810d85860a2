"""Checks of the arguments that both of Mamba-3's recurrences take, with one input of each head or several."""

from torch import Tensor

from baton.kernels.errors import (
    KernelError,
    expect_dtype,
    expect_one_precision,
    expect_positions,
    expect_state_keys,
    expect_tensor,
)
from baton.kernels.protocol import State


def expect_arguments(
    kernel: str, inputs: dict[str, Tensor], pos: Tensor | None, initial_state: State | None, *, rank: tuple[str, ...] = ()
) -> None:
    """Raises KernelError for an argument of another shape, dtype or device than `mamba3` says.

    inputs: x, B, C, dt, g, lam, theta, B_bias, C_bias and D, and mimo_x with several inputs. rank: ("rank",) then, the axis before
    d_state and before head_dim of what each input has of its own.
    """
    x, B, theta = inputs["x"], inputs["B"], inputs["theta"]
    if not isinstance(x, Tensor):
        raise KernelError(f"{kernel}: x is a {type(x).__name__}, expected a tensor of shape (batch, T, heads, head_dim)")

    def expect(name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        expect_tensor(kernel, name, inputs[name], axes, shape, x.device)

    expect("x", ("batch", "T", "heads", "head_dim"), (-1, -1, -1, -1))
    batch, length, heads, head_dim = x.shape
    expect("B", ("batch", "T", "groups", *rank, "d_state"), (batch, length, -1, *(-1 for _ in rank), -1))
    groups, *own, d_state = B.shape[2:]
    if heads % groups:
        raise KernelError(f"{kernel}: B has {groups} groups, expected a divisor of the {heads} heads of x")
    expect("C", ("batch", "T", "groups", *rank, "d_state"), tuple(B.shape))
    for name in ("dt", "g", "lam"):
        expect(name, ("batch", "T", "heads"), (batch, length, heads))
    expect("theta", ("batch", "T", "pairs"), (batch, length, -1))
    if not 0 < 2 * theta.shape[2] <= d_state:
        raise KernelError(f"{kernel}: theta has {theta.shape[2]} pairs, expected 1 to {d_state // 2} of {d_state} states")
    for name in ("B_bias", "C_bias"):
        expect(name, ("heads", *rank, "d_state"), (heads, *own, d_state))
    expect("D", ("heads",), (heads,))
    if rank:
        expect("mimo_x", ("heads", *rank, "head_dim"), (heads, *own, head_dim))
    dtype = expect_one_precision(kernel, **inputs)
    if pos is not None:
        expect_positions(kernel, pos, batch, length, x.device)
    if initial_state is None:
        return
    expect_state_keys(kernel, "initial_state", initial_state, ("h", "k", "x"))
    axes = {"h": ("d_state", "head_dim"), "k": (*rank, "d_state"), "x": (*rank, "head_dim")}
    sizes = {"h": (d_state, head_dim), "k": (*own, d_state), "x": (*own, head_dim)}
    for name, tensor in initial_state.items():
        name_of = f"initial_state {name}"
        expect_tensor(kernel, name_of, tensor, ("batch", "heads", *axes[name]), (batch, heads, *sizes[name]), x.device)
        expect_dtype(kernel, name_of, tensor, (dtype,))
