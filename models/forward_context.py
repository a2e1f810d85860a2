"""The context of one forward pass, an argument from the step executor through model, layer and mixer to each recurrence.

It holds what a recurrence cannot infer from its inputs. It is an argument and not an attribute of modules because passes of one
model may differ in it, and because a recomputed layer needs the context of its first pass.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from baton.kernels.errors import KernelError
from baton.kernels.protocol import Recurrence
from baton.parallel.context_parallel import ContextLink


@dataclass(frozen=True)
class ForwardContext:
    """Where a forward pass has its sequences, and what it has to compute.

    Attributes:
        link: the context-parallel neighbours, which have the tokens before and after this rank's; None: this rank has whole
            sequences.
        need_final_state: False: final States are not computed, unless the link sends them to the next rank; placeholders that
            raise on use are returned (baton.kernels.protocol.absent_state).
        overwrite_states: every sequence has one token, and its final State is written over the one given (`Recurrence.step`).
        layer: what names of the layer's recurrences begin with in the whole model, for example "layers.3."; "": a mixer on its own.
            A mixer that several layers share does not know it otherwise.
        shared: tensors that layers hand on to later ones beside the residual stream, by name; None: there are no other layers.
        recorded: a set that recurrences are added to; they then run their definition, not their kernels. None: they run as usual.
    """

    link: ContextLink | None = None
    need_final_state: bool = True
    overwrite_states: bool = False
    layer: str = ""
    shared: dict[str, Tensor] | None = None
    recorded: set[Recurrence] | None = None

    def of_one_pass(self) -> "ForwardContext":
        """This context with nothing handed on yet."""
        return replace(self, shared={})

    def in_layer(self, number: str) -> "ForwardContext":
        """This context in the layer with this number."""
        return replace(self, layer=f"layers.{number}.")

    def hand_on(self, name: str, x: Tensor) -> None:
        """Hand x on to later layers. A layer that runs again for its gradients does not replace what it handed on."""
        if self.shared is not None:
            self.shared.setdefault(name, x)

    def handed_on(self, name: str, own: Tensor) -> Tensor:
        """What an earlier layer handed on. own: the reader's tensor, which stands in for it where recurrences are recorded."""
        if self.recorded is not None:
            return own
        if self.shared is None or name not in self.shared:
            raise KernelError(f"forward context: no earlier layer handed on {name}; run the layer in its model")
        return self.shared[name]


LOCAL = ForwardContext()
"""Whole sequences, whose final State is needed: what a mixer used on its own has."""
