"""The GPU as a copier uses it: streams, events, launches, copies over the bus, memory.

A stream is a CUDA handle: `torch.cuda.current_stream().cuda_stream`, CuPy's `Stream.ptr`, or 0 for the default stream.
Work on one stream runs in order; events order streams among each other. `CupyDevice` is the real device. The tests
implement `Device` on the CPU and run the same kernels there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ConfigError
from kvcache.transfer.cuda.kernels import OPTIONS, THREADS, Launch, source

# Batched copies: many copies over the bus in one driver call, cuMemcpyBatchAsync (driver 12.8 and later). CuPy does not
# have it, so it is called through libcuda's C interface. The call uses the current context.

Addresses = NDArray[np.uint64]

ATTRIBUTES = np.dtype(
    [
        ("source_order", "i4"),
        ("source_place", "i4", (2,)),
        ("target_place", "i4", (2,)),
        ("flags", "u4"),
    ]
)
"""CUmemcpyAttributes of cuda.h. The places are hints for managed memory and stay 0."""

_IN_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1


class BatchCopy:
    """The driver's batched copy, where it exists."""

    def __init__(self, library: Any) -> None:
        self._call = next(
            (
                (getattr(library, name), with_failure)
                for name, with_failure in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True))
                if hasattr(library, name)
            ),
            None,
        )

    @classmethod
    def of_driver(cls) -> BatchCopy:
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError:
            return cls(None)

    @property
    def available(self) -> bool:
        return self._call is not None

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> bool:
        """Put the copies on the stream, which must not be the default stream.

        Returns:
            False where the driver refused. The caller then copies one by one. Copies of the batch that already began
            are harmless, since they write the same bytes.
        """
        if self._call is None or not len(sizes):
            return not len(sizes)
        call, with_failure = self._call
        attributes = np.zeros(1, ATTRIBUTES)
        attributes["source_order"], attributes["flags"] = _IN_STREAM_ORDER, _BESIDE_COMPUTE
        first, failed = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        arrays = [np.ascontiguousarray(a, np.uint64) for a in (targets, sources, sizes)]
        given: list[Any] = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        given += [ctypes.c_size_t(len(sizes)), ctypes.c_void_p(attributes.ctypes.data)]
        given += [ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(1)]
        given += [ctypes.c_void_p(failed.ctypes.data)] if with_failure else []
        if call(*given, ctypes.c_void_p(stream)) == 0:
            return True
        self._call = None  # the driver does not support the call, or not these pointers: do not try again
        return False


_PORTABLE_AND_MAPPED, _READ_ONLY = 3, 8  # cudaHostRegister's flags: for every context, and mapped for kernels


class Event(Protocol):
    """A point in a stream. Both members raise a fault that the device reports for work before that point."""

    @property
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that is freed when this object is collected. `pointer` is its address on host and device."""

    pointer: int
    owner: Any = field(repr=False)


class Device(Protocol):
    name: str  # as torch spells it: cuda:0
    multiprocessors: int

    def stream(self) -> int:
        """Return a new non-blocking stream, which lives until the device object is collected."""

    def record(self, stream: int) -> Event: ...
    def follow(self, stream: int, event: Event) -> None:
        """Make later work on `stream` wait for the event."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Launch a kernel on a stream that this device made."""

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, pinned: bool) -> None:
        """Copy between host and device, in any order. The call may block where host memory is not `pinned`."""

    def memory(self, size_bytes: int, stream: int) -> DeviceMemory:
        """Allocate device memory for use on that stream."""

    def host_memory(self, size_bytes: int) -> DeviceMemory:
        """Allocate pinned host memory."""

    def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        """Pin host memory and return its address for kernels. Raises OSError where that fails."""

    def unregister(self, address: int) -> None: ...
    def seconds(self, stream: int, work: Callable[[], None]) -> float:
        """Return the time that the work which `work` puts on the stream takes there. Blocks until it is done."""


class CupyDevice:
    """A GPU through CuPy.

    Thread safety: any thread may call it.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(
                "pages on a GPU need CuPy: pip install 'kvcache-tiers[cuda13]', or [cuda12] for a driver below 580"
            ) from error
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        try:
            count = self._runtime.getDeviceCount()
        except self._runtime.CUDARuntimeError as error:
            raise ConfigError(f"no GPU for this process: {error}; look at nvidia-smi") from error
        if not 0 <= index < count:
            raise ConfigError(f"device cuda:{index}: expected one of cuda:0 to cuda:{count - 1}")
        self.name = f"cuda:{index}"
        self._device = cupy.cuda.Device(index)
        self.multiprocessors: int = self._device.attributes["MultiProcessorCount"]
        self._batch = BatchCopy.of_driver()
        self._streams: dict[int, Any] = {}
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}

    def stream(self) -> int:
        with self._device:
            made = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[made.ptr] = made
        return int(made.ptr)

    def record(self, stream: int) -> Event:
        with self._device:
            event: Event = self._cupy.cuda.Event(block=True, disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)  # type: ignore[attr-defined]  # `ptr` is CuPy's, not in the protocol
        return event

    def follow(self, stream: int, event: Event) -> None:
        with self._device:
            self._runtime.streamWaitEvent(stream, event.ptr)  # type: ignore[attr-defined]  # as in `record`

    def launch(self, launch: Launch, stream: int) -> None:
        with self._device, self._streams[stream]:
            self._kernel(launch.kernel)(launch.grid, (THREADS,), (launch.job,))

    def _kernel(self, name: str) -> Any:
        if name not in self._kernels:
            file, _, function = name.partition(":")
            if file not in self._modules:
                self._modules[file] = self._cupy.RawModule(code=source(file), options=OPTIONS)
            self._kernels[name] = self._modules[file].get_function(function)
        return self._kernels[name]

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, pinned: bool) -> None:
        with self._device:
            if pinned and self._batch.copy(targets, sources, sizes, stream):
                return
            for target, origin, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._runtime.memcpyAsync(target, origin, size, self._runtime.memcpyDefault, stream)

    def memory(self, size_bytes: int, stream: int) -> DeviceMemory:
        with self._device, self._streams[stream]:
            made = self._cupy.cuda.alloc(size_bytes)
        return DeviceMemory(int(made.ptr), made)

    def host_memory(self, size_bytes: int) -> DeviceMemory:
        with self._device:
            made = self._cupy.cuda.alloc_pinned_memory(size_bytes)
        return DeviceMemory(int(made.ptr), made)

    def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        with self._device:
            flags = _PORTABLE_AND_MAPPED | (_READ_ONLY if read_only else 0)
            try:
                self._runtime.hostRegister(address, size_bytes, flags)
            except self._runtime.CUDARuntimeError as error:
                raise OSError(str(error)) from error
            return int(self._runtime.pointerGetAttributes(address).devicePointer)

    def unregister(self, address: int) -> None:
        with self._device:
            self._runtime.hostUnregister(address)

    def seconds(self, stream: int, work: Callable[[], None]) -> float:
        with self._device:
            before, after = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            self._runtime.eventRecord(before.ptr, stream)
            work()
            self._runtime.eventRecord(after.ptr, stream)
            after.synchronize()
            return float(self._cupy.cuda.get_elapsed_time(before, after)) / 1e3
