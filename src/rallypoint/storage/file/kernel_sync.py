"""Asynchronous `fdatasync` by the kernel: started with one call, done when a descriptor is readable. Linux only.

A thread that syncs needs the interpreter several times per commit, and competes with a busy event loop for it: with 64
clients that took 20 futex calls per commit, and a fifth of the server's CPU time. Here a kernel worker waits for the
disk (IOCB_CMD_FDSYNC of Linux AIO, since 4.18), and the event loop polls the descriptor like a socket. If the kernel, a
sandbox or the file system does not support it, `KernelSync` or its `start` raises OSError, and a thread must sync.

Rejected: io_uring. It does the same, needs rings of shared memory, and is often forbidden in containers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

__all__ = ["KernelSync"]

_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""System call numbers of io_setup, io_destroy, io_getevents and io_submit."""

_FDSYNC, _RESFD = 3, 1
_IOCB = struct.Struct("<QIIHhIQQqQII")  # data, -, flags, opcode, priority, fd, buffer, bytes, offset, -, flags, eventfd
_EVENT = struct.Struct("<QQqq")  # data, iocb, result, -


class KernelSync:
    """Syncs one file at a time, in the process that created it. Raises OSError if the kernel does not support it."""

    def __init__(self) -> None:
        numbers = _SYSCALLS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(0)
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._call(self._setup, 1, ctypes.byref(self._context))
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._iocb = ctypes.create_string_buffer(_IOCB.size)
        self._iocbs = (ctypes.c_void_p * 1)(ctypes.addressof(self._iocb))
        self._event = ctypes.create_string_buffer(_EVENT.size)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a sync is complete."""
        return self._fd

    def start(self, fd: int) -> None:
        """Start to sync a file; call `finish` before the next one."""
        _IOCB.pack_into(self._iocb, 0, 0, 0, 0, _FDSYNC, 0, fd, 0, 0, 0, 0, _RESFD, self._fd)
        self._call(self._submit, self._context, 1, self._iocbs)

    def finish(self, *, wait: bool = False) -> int | None:
        """Return the errno of the sync, 0 if it succeeded, None while it is in progress."""
        try:
            os.eventfd_read(self._fd)  # first: the kernel signals an event after it has queued it
        except BlockingIOError:
            pass
        if not self._call(self._getevents, self._context, int(wait), 1, self._event, None):
            return None
        result: int = _EVENT.unpack_from(self._event)[2]
        return -result

    def close(self) -> None:
        """Wait for a sync in progress and free the kernel's resources; harmless when repeated."""
        if self._fd >= 0:
            self._call(self._destroy, self._context)
            os.close(self._fd)
            self._fd = -1

    def _call(self, number: int, *arguments: object) -> int:
        """Make a system call; repeat it if a signal interrupts it."""
        while True:
            result: int = self._syscall(number, *arguments)
            if result >= 0:
                return result
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))
