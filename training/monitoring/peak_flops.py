"""GPUs' peak FLOP/s by their data sheets, and model FLOPs utilization (MFU). Torch-free.

MFU (Chowdhery et al. 2022) counts model FLOPs in two ways, as papers do: 6 per parameter and token, and with the mixers'
own operations added (launcher/planner). Recomputed operations count in neither.
"""

from dataclasses import dataclass
from typing import Any

# TFLOP/s of dense matmuls, bfloat16 and float32 (without TensorFloat-32). The first name that a device's contains counts.
_SHEETS = (
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("GH200", 989.0, 67.0),
    ("H200", 989.0, 67.0),
    ("H100", 989.0, 67.0),
    ("H800", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("B200", 2250.0, 75.0),
    ("L40S", 362.0, 91.6),
)


@dataclass(frozen=True)
class DevicePeak:
    """tflops: of one device, 10^12 operations per second. name: which device, and by what source."""

    tflops: float
    name: str


def device_peak(device: str, compute_dtype: str, given: float | None = None) -> DevicePeak | None:
    """Peak of a device by its name; None if it is not known. given: overrides the table (profile.peak_tflops)."""
    if given is not None:
        return DevicePeak(given, "profile.peak_tflops")
    for name, bfloat16, float32 in _SHEETS:
        if name in device:
            return DevicePeak(bfloat16 if compute_dtype == "bfloat16" else float32, f"{device}, dense {compute_dtype}, data sheet")
    return None


@dataclass(frozen=True)
class Utilisation:
    """Utilization of a step.

    Attributes:
        parameters: of the model.
        flops: per token with mixers counted; None: not known.
        tokens, seconds: of the step.
        devices: that share the step.
    """

    parameters: int
    flops: float | None
    tokens: int
    seconds: float
    devices: int
    peak: DevicePeak | None

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.tokens / self.seconds

    def share(self, flops_per_token: float | None) -> float | None:
        """Share of the peak; None if the peak or the FLOPs are not known."""
        if self.peak is None or flops_per_token is None:
            return None
        return flops_per_token * self.tokens_per_s / (self.devices * self.peak.tflops * 1e12)

    @property
    def mfu_6n(self) -> float | None:
        return self.share(6.0 * self.parameters)

    @property
    def mfu_model(self) -> float | None:
        return self.share(self.flops)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "parameters": self.parameters,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "flops_per_token_6n": 6.0 * self.parameters,
            "flops_per_token_model": self.flops,
            "mfu_6n": self.mfu_6n,
            "mfu_model": self.mfu_model,
            "peak_tflops": None if self.peak is None else self.peak.tflops,
            "peak": None if self.peak is None else self.peak.name,
        }

    def __str__(self) -> str:
        if self.peak is None:
            return "model FLOPs utilisation: this device's peak is not known; set profile.peak_tflops"
        mixers = "" if self.mfu_model is None else f", {self.mfu_model:.1%} with mixers counted"
        return f"model FLOPs utilisation {self.mfu_6n:.1%} as 6N{mixers}, of {self.peak.tflops:,g} TFLOP/s ({self.peak.name})"
