"""How many GPUs are there? Counted by NVML, so that nobody has to import torch for it."""

from __future__ import annotations

import os


def count_gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; 0 without a driver."""
    import pynvml  # not needed for --device cpu

    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
