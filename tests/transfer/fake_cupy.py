"""As much of CuPy as `CupyDevice` asks for, over `HostDevice`: a call that CuPy does not have, or not so, fails."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kvcache.transfer.cuda.kernels import Launch
from tests.transfer.cuda_on_cpu import HostDevice


class CUDARuntimeError(Exception):
    pass


class Current:
    """What a `with` makes the current device or stream of."""

    def __init__(self, stack: list[Any], value: Any, **more: Any) -> None:
        self._stack, self._value = stack, value
        self.__dict__ |= more

    def __enter__(self) -> None:
        self._stack.append(self._value)

    def __exit__(self, *error: object) -> None:
        self._stack.pop()


class Event:
    def __init__(self, events: dict[int, Any], *, block: bool = False, disable_timing: bool = False) -> None:
        self.ptr, self._events = id(self), events

    @property
    def done(self) -> bool:
        return bool(self._events[self.ptr].done)

    def synchronize(self) -> None:
        self._events[self.ptr].synchronize()


class FakeCupy(ModuleType):
    def __init__(self, *, devices: int = 2, pinning: bool = True) -> None:
        super().__init__("cupy")
        self.host, self._devices, self._pinning = HostDevice(), devices, pinning
        self.device_stack: list[int] = []
        self._stream_stack, self._events = [0], {}
        self.compiled: list[str] = []
        self.flags: list[int] = []
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                memcpyDefault=4,
                getDeviceCount=self._count,
                memcpyAsync=self._memcpy,
                eventRecord=lambda event, stream: self._events.__setitem__(event, self.host.record(stream)),
                streamWaitEvent=lambda stream, event: self.host.follow(stream, self._events[event]),
                hostRegister=self._register,
                hostUnregister=lambda pointer: None,
                pointerGetAttributes=lambda pointer: SimpleNamespace(devicePointer=pointer),
            ),
            Device=lambda i: Current(self.device_stack, i, attributes={"MultiProcessorCount": 3}),
            Stream=self._stream,
            Event=lambda **options: Event(self._events, **options),
            alloc=self._alloc,
            alloc_pinned_memory=self._alloc,
            get_elapsed_time=lambda before, after: 2.0,  # milliseconds
        )

    def _count(self) -> int:
        if not self._devices:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return self._devices

    def _stream(self, *, non_blocking: bool) -> Current:
        assert non_blocking
        handle = self.host.stream()
        return Current(self._stream_stack, handle, ptr=handle)

    def _alloc(self, size: int) -> Any:
        made = self.host.memory(size, 0)
        return SimpleNamespace(ptr=made.pointer, owner=made)

    def _memcpy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert (kind, self.device_stack[-1]) == (4, 1)
        self.host.put(stream, lambda: ctypes.memmove(target, source, size))

    def _register(self, pointer: int, size: int, flags: int) -> None:
        if not self._pinning:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.flags.append(flags)

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        self.compiled.append(code)
        file = "copy.cu" if "gather" in code else "quantise.cu"

        def function(name: str) -> Any:
            def call(grid: tuple[int, int], block: tuple[int], arguments: tuple[np.ndarray[Any, Any]]) -> None:
                assert (self.device_stack[-1], block, arguments[0].shape) == (1, (256,), (1,))
                self.host.launch(Launch(f"{file}:{name}", grid, arguments[0]), self._stream_stack[-1])

            return call

        return SimpleNamespace(get_function=function)
