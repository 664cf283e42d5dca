"""What the machine is doing meanwhile: the ``perf`` metrics of ``log_sys_usage``."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import Any

from trainyard.errors import ConfigError

__all__ = ["UsageMonitor"]


class UsageMonitor:
    """Samples CPU, memory and GPUs in a thread; :meth:`read` gives the means since the last read.

    Args:
        period_s: seconds between samples, as in Ray Tune's ``UtilMonitor``.

    Raises:
        ConfigError: psutil is not installed.
    """

    def __init__(self, period_s: float = 0.7) -> None:
        try:
            import psutil
        except ImportError:
            raise ConfigError("config.log_sys_usage needs psutil: pip install 'trainyard[system]'") from None
        self._psutil = psutil
        self._gpus = _open_gpus()
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(period_s,), name="trainyard-usage", daemon=True)
        psutil.cpu_percent(interval=None)  # the first answer covers nothing
        self._thread.start()

    def read(self) -> dict[str, float]:
        """Means since the last read: ``cpu_util_percent`` and ``ram_util_percent`` (0-100), and for each GPU
        ``gpu_util_percent<i>`` and ``vram_util_percent<i>`` (0-1). Never empty while the monitor runs."""
        with self._lock:
            if not self._samples and not self._stop.is_set():
                self._sample()
            samples, self._samples = self._samples, defaultdict(list)
        return {name: sum(values) / len(values) for name, values in samples.items()}

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self, period_s: float) -> None:
        while not self._stop.wait(period_s):
            with self._lock:
                self._sample()

    def _sample(self) -> None:
        self._samples["cpu_util_percent"].append(self._psutil.cpu_percent(interval=None))
        self._samples["ram_util_percent"].append(self._psutil.virtual_memory().percent)
        for i, (nvml, handle) in enumerate(self._gpus):
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                self._samples[f"gpu_util_percent{i}"].append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                self._samples[f"vram_util_percent{i}"].append(memory.used / memory.total)


def _open_gpus() -> list[tuple[Any, Any]]:
    """NVIDIA's library and a handle for each GPU; none where there is no library, driver or GPU."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
