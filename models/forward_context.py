"""The context of one forward pass, an argument from the step executor through model, layer and mixer to each recurrence.

It holds what a recurrence cannot infer from its inputs. It is an argument and not an attribute of modules because passes of one
model may differ in it, and because a recomputed layer needs the context of its first pass.
"""

from dataclasses import dataclass

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
        recorded: a set that recurrences are added to; they then run their definition, not their kernels. None: they run as usual.
    """

    link: ContextLink | None = None
    need_final_state: bool = True
    recorded: set[Recurrence] | None = None


LOCAL = ForwardContext()
"""Whole sequences, whose final State is needed: what a mixer used on its own has."""
