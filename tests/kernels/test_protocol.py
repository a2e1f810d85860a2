"""Operations on a State: zeroing, detaching, flattening into one message, checking."""

import pytest
import torch

from baton.kernels import protocol, state_message
from baton.kernels.errors import KernelError
from baton.kernels.protocol import StateSpec

LEAVES = (
    StateSpec("h", (3, 5), torch.float32, tp=0, grad=True),
    StateSpec("tail", (1, 3), torch.bfloat16, tp=1, grad=True),
    StateSpec("valid", (7,), torch.bool, tp=None, grad=False),
    StateSpec("where", (2,), torch.int64, tp=None, grad=False),
    StateSpec("nothing", (0, 3), torch.float64, tp=1, grad=True),
)


def _state(batch: int) -> protocol.State:
    generator = torch.Generator().manual_seed(1)
    return {leaf.name: (10 * torch.randn(batch, *leaf.shape, generator=generator)).to(leaf.dtype) for leaf in LEAVES}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_state_survives_the_round_trip_bit_for_bit(batch: int):
    state = _state(batch)
    message = state_message.to_flat(state, LEAVES)
    assert message.dtype == torch.uint8
    assert message.is_contiguous()
    assert message.numel() == state_message.flat_nbytes(LEAVES, batch)
    back = state_message.from_flat(message, LEAVES, batch)
    assert list(back) == [leaf.name for leaf in LEAVES]
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_equal_states_make_equal_messages_whatever_their_memory_layout():
    state = _state(3)
    strided = {
        name: x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(x.is_floating_point()) for name, x in state.items()
    }
    message = state_message.to_flat(strided, LEAVES)
    assert torch.equal(message, state_message.to_flat(state, LEAVES))
    assert not message.requires_grad


def test_a_message_is_a_copy_and_its_state_a_view():
    state = _state(1)
    message = state_message.to_flat(state, LEAVES)
    state["h"].zero_()
    received = state_message.from_flat(message, LEAVES, 1)
    assert received["h"].any()
    message.zero_()
    assert not received["h"].any()


def test_zeros_and_detach():
    state = protocol.zeros(LEAVES, 2, "cpu")
    protocol.check(state, LEAVES, 2)
    assert not any(x.any() for x in state.values())
    attached = {"h": torch.ones(1, requires_grad=True) * 2}
    assert not protocol.detach(attached)["h"].requires_grad
    assert attached["h"].requires_grad


def test_a_state_that_is_not_as_described_is_refused_by_name():
    state = _state(2)
    with pytest.raises(KernelError, match=r"h has shape \(2, 3, 5\), expected \(batch, \.\.\.\) = \(3, 3, 5\)"):
        protocol.check(state, LEAVES, 3)
    with pytest.raises(KernelError, match=r"tail has dtype torch\.float32, expected torch\.bfloat16"):
        protocol.check({**state, "tail": state["tail"].float()}, LEAVES, 2)
    with pytest.raises(KernelError, match=r"expected .*where"):
        state_message.to_flat({name: x for name, x in state.items() if name != "where"}, LEAVES)
    with pytest.raises(KernelError, match="extra"):
        protocol.check({**state, "extra": state["h"]}, LEAVES, 2)


def test_what_was_not_wanted_is_taken_for_no_state():
    """Sending, detaching, saving or computing with it raises an error."""
    state = protocol.absent_state(LEAVES)
    assert list(state) == [leaf.name for leaf in LEAVES]
    said = r"^state: h was not made: the pass that it leaves was told that no State is wanted of it$"
    for use in (
        lambda: state["h"].shape,
        lambda: protocol.detach(state),
        lambda: protocol.check(state, LEAVES, 2),
        lambda: state_message.to_flat(state, LEAVES),
        lambda: state["h"].requires_grad_(),
    ):
        with pytest.raises(KernelError, match=said):
            use()
    for use in (lambda: torch.ones(2) + state["h"], lambda: torch.cat((state["h"], torch.ones(1))), lambda: state["h"][0]):
        with pytest.raises(TypeError):
            use()
    assert not isinstance(state["h"], torch.Tensor)
    assert repr(state["h"]) == "not made: h"


def test_a_message_of_another_size_is_refused():
    message = state_message.to_flat(_state(2), LEAVES)
    with pytest.raises(KernelError, match="message has shape"):
        state_message.from_flat(message, LEAVES, 3)
    with pytest.raises(KernelError, match="message has shape"):
        state_message.from_flat(message.float(), LEAVES, 2)


def test_a_leaf_that_cannot_be_is_refused():
    with pytest.raises(KernelError, match="h has tp 2"):
        StateSpec("h", (3, 5), torch.float32, tp=2, grad=True)
    with pytest.raises(KernelError, match="where has dtype"):
        StateSpec("where", (2,), torch.int64, tp=None, grad=True)
