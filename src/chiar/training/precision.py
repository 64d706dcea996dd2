"""In what precision a device trains best."""

from dataclasses import replace

import torch

from chiar.training.distributed import Processes
from chiar.training.run_folder import RunFolder, told
from chiar.training.settings import TrainSettings


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 itself; elsewhere it is emulated, and slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch cannot tell
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def settle(settings: TrainSettings, processes: Processes, resumed: RunFolder | None) -> TrainSettings:
    """`auto` as what it means on the main process's device, or as what a resumed run was begun with."""
    if settings.precision != "auto":
        return settings

    def choose() -> str:
        if resumed is not None:
            return told(resumed.read(), "settings", resumed.path.name)["precision"]
        return "bf16" if computes_bf16(processes.device) else "fp32"

    return replace(settings, precision=processes.from_main(choose))
