"""Which kind of device memory a process uses. Nothing of CUDA is imported or begun before it is asked for."""

from __future__ import annotations

from kvstore.devices.memory import DeviceMemory


def device_memory(kind: str) -> DeviceMemory:
    """Return what lends and opens memory; see the setting ``KVSTORE_DEVICE_SUM``.

    Args:
        kind: ``cuda``, or ``host`` for files in memory in the place of a device.

    Raises:
        CannotLend: this system has no such memory.
    """
    if kind == "host":
        from kvstore.devices.host import HostMemory

        return HostMemory()
    from kvstore.devices.cuda import CudaMemory

    return CudaMemory()
