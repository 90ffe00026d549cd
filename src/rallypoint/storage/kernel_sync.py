"""`fdatasync` by the kernel: started with one call, and over when a descriptor becomes readable. Linux only.

A thread that syncs needs the interpreter several times a commit, and has to fight a busy event loop for it: with 64
clients that was 20 futex calls a commit, and a fifth of the server's processor time. Here a worker of the kernel waits
for the disk (IOCB_CMD_FDSYNC of Linux's asynchronous I/O, since 4.18), and the event loop learns of the end as it
learns of data on a socket. Where the kernel, a sandbox or a file system lacks it, `KernelSync` or its `start` raises
OSError, and a thread has to sync.

Rejected: io_uring. It does the same, with rings of shared memory to keep in order, and containers often forbid it.
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
"""The numbers of io_setup, io_destroy, io_getevents and io_submit."""

_FDSYNC, _RESFD = 3, 1
_IOCB = struct.Struct("<QIIHhIQQqQII")  # data, -, flags, opcode, priority, fd, buffer, bytes, offset, -, flags, eventfd
_EVENT = struct.Struct("<QQqq")  # data, iocb, result, -


class KernelSync:
    """Syncs one file at a time, in the process that created this. Raises OSError where the kernel cannot do it."""

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
        """Return the descriptor that becomes readable when a sync is over."""
        return self._fd

    def start(self, fd: int) -> None:
        """Begin to sync a file; `finish` before the next one."""
        _IOCB.pack_into(self._iocb, 0, 0, 0, 0, _FDSYNC, 0, fd, 0, 0, 0, 0, _RESFD, self._fd)
        self._call(self._submit, self._context, 1, self._iocbs)

    def finish(self, *, wait: bool = False) -> int | None:
        """Return the error number of the sync, 0 if it succeeded, None while it is under way."""
        try:
            os.eventfd_read(self._fd)  # first: the kernel signals an event after it has queued it
        except BlockingIOError:
            pass
        if not self._call(self._getevents, self._context, int(wait), 1, self._event, None):
            return None
        result: int = _EVENT.unpack_from(self._event)[2]
        return -result

    def close(self) -> None:
        """Free what the kernel holds, after a sync that is under way; harmless when it is closed already."""
        if self._fd >= 0:
            self._call(self._destroy, self._context)
            os.close(self._fd)
            self._fd = -1

    def _call(self, number: int, *arguments: object) -> int:
        """Make a system call; repeat it where a signal interrupts it."""
        while True:
            result: int = self._syscall(number, *arguments)
            if result >= 0:
                return result
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))
