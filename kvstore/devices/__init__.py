"""Memory of a device that another process of the same host may read: what differs between kinds of devices.

memory  handles of lent memory, and the interface of what lends and opens it
cuda    CUDA devices, by CUDA IPC
host    files in memory in the place of a device, so that all else can be tested without one
choose  which of them a process uses
"""

from kvstore.devices.choose import device_memory
from kvstore.devices.memory import MOST_LOANS, CannotLend, DeviceMemory, Filling, Handle, Lent

__all__ = ["MOST_LOANS", "CannotLend", "DeviceMemory", "Filling", "Handle", "Lent", "device_memory"]
