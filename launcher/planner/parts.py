"""The parts of a rank's memory, and its peak. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in bytes, by part.

    Permanent:
        parameters, compute_copies, gradients: fp32 parameters, their copies in the compute dtype, and gradients.
        optimizer: the moments of the rank's parameters, from ZeRO-1 on of its partition.
        tokens: token ids, labels and positions of a whole step.
        lanes: the States that lanes carry from step to step with truncated backpropagation through time.
        before: a copy of the step's lane States, for a step that is rejected.
        states: the final States of passes; none for whole sequences on one rank.
        saved: on a CPU, the copy of a checkpoint's contents (see Arithmetic.host_bytes).
    Temporary:
        activations: saved activations of all passes in flight.
        borders: entering States of segments that are to run again, and scores that are not recomputed; with recorded passes
            also what of segments stays in one place.
        inputs: hidden vectors from the previous stage for those segments.
        in_hand: the backward pass of one sub-block.
        loss: one chunk's logits, and the head's gradient.
        buffers: of the optimizer's step; recorded: memory pools of passes that are recorded as CUDA graphs.
    """

    parameters: int
    compute_copies: int
    gradients: int
    optimizer: int
    tokens: int
    lanes: int
    before: int
    saved: int
    activations: int
    borders: int
    inputs: int
    in_hand: int
    states: int
    loss: int
    buffers: int
    recorded: int

    @property
    def weights(self) -> int:
        """Bytes that follow from the parameters alone."""
        return self.parameters + self.compute_copies + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        kept = self.activations + self.borders + self.inputs
        lasting = self.weights - self.buffers + self.tokens + self.lanes + self.before + self.saved + self.states
        return lasting + max(kept + max(self.in_hand, self.loss), self.buffers + self.recorded)
