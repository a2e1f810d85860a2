"""Lattice's recurrence token by token over the slots of a chunk, forward and backward: the loop that all variants and options run
in.

Shapes: time first, broadcastable against slots. With N = batch x heads: S [N, d, m]; q, k and other per-slot values [L, N, 1, m];
v, h and y [L, N, d, 1]; gamma, mu and tau [L, N, 1, 1].

The backward pass is derived by hand. The forward loop keeps the slots after each token and a few vectors; in the backward loop
every quantity of a step takes one or two passes over its slots, where autograd would allocate and free a dozen tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.lattice.variant import MIN_NORM, UpdateRule, slot_norms


class Tokens(NamedTuple):
    """The inputs of a chunk, in the compute dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    mu: Tensor | None
    tau: Tensor | None


class DocumentStarts(NamedTuple):
    """Where documents start in a chunk.

    Attributes:
        mask: bool [L, N, 1, 1].
        tokens: for each token, whether a document starts there in any lane.
        slots: the initial slots that a document starts with, [N, d, m].
    """

    mask: Tensor
    tokens: list[bool]
    slots: Tensor


class Gradients(NamedTuple):
    """Result of `StepLoop.backward`.

    Attributes:
        h, k, gamma, mu, tau, S: gradients of the loop's arguments (h without its dependence on the slots in decoding).
        dloaded: of the initial slots that documents start with.
        a: of a = Phi^T h, in encoding including the part through c.
        radial: with projection, the components of the slots' cotangents along the slots after each token.
    """

    h: Tensor
    k: Tensor
    gamma: Tensor
    mu: Tensor | None
    tau: Tensor | None
    S: Tensor
    dloaded: Tensor | None
    a: Tensor
    radial: Tensor


def known_h(rule: UpdateRule, v: Tensor) -> Tensor:
    """The part of h that does not depend on the state: v in encoding, else -v. The map is its own transpose, so it also maps
    gradients.
    """
    return v if rule.variant == "enc" else -v


class StepLoop:
    """One chunk's steps u = mu s + w (h - phi a), with a = phi . h and w = -gamma c / rho (equations: `op.lattice`).

    Attributes:
        states: the slots before the first token and after each, [L + 1, N, d, m].
        h, c, a, weight: h, c, a and w of every token.
        norm: with projection, the norm that each u was divided by.
    """

    def __init__(
        self,
        rule: UpdateRule,
        starts: DocumentStarts | None,
        h: Tensor,
        k: Tensor,
        gamma: Tensor,
        mu: Tensor | None,
        tau: Tensor | None,
        S: Tensor,
    ) -> None:
        """h: as `known_h` returns it; decoding adds Phi k in place."""
        self.rule, self.starts, self.h, self.k, self.gamma, self.mu, self.tau = rule, starts, h, k, gamma, mu, tau
        self.states = S.new_empty(len(k) + 1, *S.shape)
        self.states[0] = S
        self.a, self.norm = torch.empty_like(k), torch.empty_like(k)
        self.rho = None if rule.project else torch.empty_like(k)
        self.c = torch.empty_like(k) if rule.variant == "enc" else k
        self.weight = torch.empty_like(k) if rule.variant == "enc" else -gamma * k
        self._forward()

    def _entering(self, t: int, S: Tensor) -> Tensor:
        """The slots that token t sees, given those after the token before it."""
        if self.starts is None or not self.starts.tokens[t]:
            return S
        return torch.where(self.starts.mask[t], self.starts.slots, S)

    def _forward(self) -> None:
        rule, tau = self.rule, self.tau
        states, h_all, k_all, c_all, a_all = _each(self.states, self.h, self.k, self.c, self.a)
        weights, norm_all, steps = _each(self.weight, self.norm, -self.gamma)
        (rho_all,), (mu_all,) = _each(self.rho), _each(self.mu)
        tangent = torch.empty_like(states[0])
        for t, (h, k, a, weight) in enumerate(zip(h_all, k_all, a_all, weights, strict=True)):
            S = Phi = self._entering(t, states[t])
            if rho_all:
                rho = torch.clamp(slot_norms(S), min=MIN_NORM, out=rho_all[t])
                Phi = S / rho
            if rule.variant == "dec":
                h.baddbmm_(Phi, k.mT)
            torch.bmm(h.mT, Phi, out=a)
            if rule.variant == "enc":
                torch.mul(torch.sub(a, k, out=c_all[t]), steps[t], out=weight)
            if rho_all:
                weight /= rho
            # h - Phi a before scaling: with a large step the result would otherwise be a difference of two large multiples of Phi
            torch.addcmul(h, Phi, a, value=-1, out=tangent)
            U = torch.addcmul(mu_all[t] * S if mu_all else S, tangent, weight, out=states[t + 1])
            vanished = None if tau is None else self._threshold(U, tau[t])
            if rule.project:
                U /= slot_norms(U, out=norm_all[t])
                if vanished is not None:
                    # a slot that vanished is constant: its cotangent is divided by infinity
                    norm_all[t].masked_fill_(vanished, torch.inf)

    def _threshold(self, U: Tensor, tau: Tensor) -> Tensor:
        """Equation 18, in place; with projection a slot that would vanish keeps its largest entry. Returns which slots vanished."""
        size = U.abs()
        vanished = (size <= tau).all(1, keepdim=True)
        shrunk = U - torch.clamp(U, -tau, tau)
        if self.rule.project:
            largest = torch.zeros_like(U).scatter_(1, size.argmax(1, keepdim=True), 1.0)
            shrunk = torch.where(vanished, U.sign() * largest, shrunk)
        U.copy_(shrunk)
        return vanished

    def backward(self, dy: Tensor, q: Tensor, dS: Tensor) -> Gradients:
        """Gradients, given the cotangent dS of the final slots; dy[t] * q[t] is added to the cotangent of the slots after token t.

        dy: [L, N, d, 1 or m].
        """
        variant, project, starts, mu, tau, length = self.rule.variant, self.rule.project, self.starts, self.mu, self.tau, len(q)
        rho = 1.0 if self.rho is None else self.rho
        factor = torch.addcmul(torch.ones_like(self.gamma) if mu is None else mu, self.weight / rho, self.a, value=-1)
        dh, da, dalpha, along, radial = (torch.empty_like(x) for x in (self.h, self.k, self.k, self.k, self.k))
        e_along = torch.empty_like(self.k) if variant == "dec" else None
        dtau = None if tau is None else torch.empty_like(tau)
        dloaded = None if starts is None else torch.zeros_like(starts.slots)
        states, h_all, k_all, a_all, weights, norm_all = _each(self.states, self.h, self.k, self.a, self.weight, self.norm)
        q_all, dy_all, factors, gammas = _each(q, dy, factor, self.gamma)
        dh_all, da_all, dalpha_all, along_all, e_along_all, radial_all = _each(dh, da, dalpha, along, e_along, radial)
        (rho_all,) = _each(self.rho)
        for t in reversed(range(length)):
            S, after, h, a, weight = self._entering(t, states[t]), states[t + 1], h_all[t], a_all[t], weights[t]
            dU = torch.addcmul(dS, dy_all[t], q_all[t])
            if project:
                torch.sum(after * dU, 1, keepdim=True, out=radial_all[t])
                dU.addcmul_(after, radial_all[t], value=-1).div_(norm_all[t])
            if tau is not None and dtau is not None:
                dtau[t] = -(dU * after.sign()).sum((1, 2), keepdim=True)
                dU.masked_fill_((after == 0) & (tau[t] != 0), 0.0)
            Phi = S / rho_all[t] if rho_all else S
            torch.sum(dU * Phi, 1, keepdim=True, out=along_all[t])
            dweight = torch.bmm(h.mT, dU, out=dalpha_all[t]).addcmul_(a, along_all[t], value=-1)
            da_t = torch.mul(weight, along_all[t], out=da_all[t]).neg_()
            if rho_all:
                # phi . dphi + rho drho; their other parts are added below
                inward = (a * da_t).addcmul_(weight, torch.addcmul(dweight, a, along_all[t], value=-1))
                dweight /= rho_all[t]
            if variant == "enc":
                da_t.addcmul_(gammas[t], dalpha_all[t], value=-1)
            dh_t = torch.baddbmm(torch.bmm(dU, weight.mT), Phi, da_t.mT, out=dh_all[t])
            dS = dU.mul_(factors[t]).addcmul_(h, da_t / rho_all[t] if rho_all else da_t)
            if variant == "dec":
                torch.bmm(dh_t.mT, Phi, out=e_along_all[t])
                dS.addcmul_(dh_t, k_all[t] / rho_all[t] if rho_all else k_all[t])
            if rho_all:
                if variant == "enc":
                    inward.addcmul_(a * gammas[t], dalpha_all[t], value=-1)
                elif variant == "dec":
                    inward.addcmul_(e_along_all[t], k_all[t])
                # where a norm is below its limit, rho is constant
                inward.masked_fill_(rho_all[t] <= MIN_NORM, 0.0)
                dS.addcmul_(Phi, inward / rho_all[t], value=-1)
            if starts is not None and dloaded is not None and starts.tokens[t]:
                dloaded += dS.masked_fill(~starts.mask[t], 0.0)
                dS.masked_fill_(starts.mask[t], 0.0)
        dc = -self.gamma * dalpha
        dk = -dc if variant == "enc" else dc if e_along is None else dc + e_along
        dgamma = -(self.c * dalpha).sum(-1, keepdim=True)
        dmu = None if mu is None else (along * rho).sum(-1, keepdim=True)
        return Gradients(dh, dk, dgamma, dmu, dtau, dS, dloaded, da, radial)


def _each(*tensors: Tensor | None) -> list[tuple[Tensor, ...]]:
    """Each tensor's tokens as views, made all at once: indexing costs as much as a small operation."""
    return [() if x is None else x.unbind(0) for x in tensors]
