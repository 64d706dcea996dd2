"""In what precision a device trains best."""

from dataclasses import replace

import torch

from chiar.training.settings import TrainSettings


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 itself; elsewhere it is emulated, and slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch cannot tell
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def settle(settings: TrainSettings, device: torch.device, before: str | None = None) -> TrainSettings:
    """`auto` as what it means on this device, or as what the run used `before`."""
    if settings.precision != "auto":
        return settings
    return replace(settings, precision=before or ("bf16" if computes_bf16(device) else "fp32"))
