"""The shared CPU device of the worker, from a model's side: takes memory from its file (see the worker's ledger), and gives it
back. Only for tests: a framework does this with a real device."""

import fcntl
import os
import struct

import vramq

MAGIC = b"vramq-memory-1\n\0"
HEADER, ROW, ROWS = 32, 32, 256


def started(pid):
    """When a process started, in ticks since boot; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


class Device:
    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _change(self, pid, change):
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            data = os.pread(self.file, HEADER + ROW * ROWS, 0)
            assert data.startswith(MAGIC)
            (total,) = struct.unpack_from("<Q", data, len(MAGIC))
            rows = [struct.unpack_from("<QQQ", data, HEADER + ROW * row) for row in range(ROWS)]
            alive = [bool(row[0]) and started(row[0]) == row[1] for row in rows]
            free = total - sum(row[2] for row, is_alive in zip(rows, alive) if is_alive)
            if change > free:
                raise vramq.OutOfMemory(asked=change, free=free, total=total, where="test device")
            own = next((at for at, row in enumerate(rows) if alive[at] and row[0] == pid), None)
            held = 0 if own is None else rows[own][2]
            at = alive.index(False) if own is None else own
            os.pwrite(self.file, struct.pack("<QQQ", pid, started(pid), max(0, held + change)), HEADER + ROW * at)
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def take(self, size, pid=None):
        self._change(os.getpid() if pid is None else pid, size)

    def give(self, size):
        self._change(os.getpid(), -size)

    def bequeath(self, size, pid):
        """What this process held, another one holds from here on."""
        self.give(size)
        self.take(size, pid)
