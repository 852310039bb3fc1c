"""Moves a process into a world of its own: no network, no other processes, a nearly empty file system.

What bubblewrap does, in the kernel's own calls, so that nothing needs to be installed: new namespaces, a root in
memory with Python's library in it (read-only) and a place for a folder to write to, and no capability left. Root can
always do this where it is allowed to mount; an ordinary user where the kernel has user namespaces for all.

The process that moved in may not mount. Its parent stays outside, keeps that one right, and mounts and unmounts the
scratch file system when it is asked to (`Scratch`): so every program gets one that nobody has written to.
"""

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Sequence

from rl_swarm.scoring.lockdown import LIBC

MOUNTS, NAMES, MESSAGES, USERS, PROCESSES, NETWORK = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
NOBODY = 65534
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, AGAIN, BIND, RECURSIVE, PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
FLAGS_KEPT = {
    1: 1,
    2: 2,
    4: 4,
    8: 8,
    1024: 1024,
    2048: 2048,
    4096: 1 << 21,
}  # as statvfs tells them, as mount takes them
NEW_ROOT = "/dev"  # covered by the new root while that is made: it is there on every Linux, and no library is in it
DETACH = 2
SYS_ADMIN = 1 << 21  # the capability to mount
MOUNT, UNMOUNT, DONE = b"+", b"-", b"."


class ScratchMount:
    """Asks the process outside for the scratch file system."""

    def __init__(self, asking: socket.socket) -> None:
        self.asking = asking

    def mount(self) -> None:
        """Mount a new one, made now: not even its times tell what was before."""
        self.asking.send(MOUNT)
        if (answer := self.asking.recv(200)) != DONE:
            raise OSError(answer.decode(errors="replace") or "the process that mounts has ended")

    def unmount(self) -> None:
        """Have it removed with all that is in it. Nobody waits: the next request comes after it."""
        self.asking.send(UNMOUNT)


def move_in(library: Sequence[str], scratch: str, options: str) -> ScratchMount:
    """Return in a forked child, the first process in there. This one mounts for it, and ends with it."""
    was_root = os.geteuid() == 0
    as_nobody = False
    if was_root:
        try:
            _unshare(MOUNTS | NAMES | MESSAGES | PROCESSES | NETWORK)
            as_nobody = True
        except OSError:  # root of a container, perhaps, without the right to mount
            was_root = False
    if not was_root:
        user, group = os.geteuid(), os.getegid()
        _unshare(USERS | MOUNTS | NAMES | MESSAGES | PROCESSES | NETWORK)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    asked, asking = socket.socketpair()
    child = os.fork()
    if child:
        asking.close()
        try:
            drop_capabilities(SYS_ADMIN)
            _mount_when_asked(asked, scratch, options)
        finally:
            asked.close()  # which ends the one inside, if it has not ended
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    asked.close()
    socket.sethostname("sandbox")
    _build(library, scratch)
    if as_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()
    _check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # when the one outside ends, so does everything in here
    return ScratchMount(asking)


def drop_capabilities(but: int = 0) -> None:
    _check(LIBC.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", but, but, 0, 0, 0, 0)), "capset")


def _mount_when_asked(asked: socket.socket, scratch: str, options: str) -> None:
    """Until the process inside ends. Both see the same mounts, and by then the new root."""
    while wish := asked.recv(1):
        if wish == UNMOUNT:
            _check(LIBC.umount2(os.fsencode(scratch), DETACH), "umount2")
            continue
        try:
            _mount("tmpfs", scratch, "tmpfs", NO_SUID | NO_DEVICES | NO_PROGRAMS, options)
        except OSError as error:
            asked.send(str(error).encode()[:200])
        else:
            asked.send(DONE)


def _build(library: Sequence[str], scratch: str) -> None:
    _mount(None, "/", None, RECURSIVE | PRIVATE)  # what is mounted here is not seen outside
    _mount("tmpfs", NEW_ROOT, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,mode=755")
    for path in library:
        inside = NEW_ROOT + path
        os.makedirs(inside)
        _mount(path, inside, None, BIND | RECURSIVE)
        kept = sum(flag for seen, flag in FLAGS_KEPT.items() if os.statvfs(inside).f_flag & seen)
        _mount(None, inside, None, AGAIN | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)
    os.makedirs(NEW_ROOT + scratch)
    if not os.path.lexists(NEW_ROOT + "/tmp"):
        os.symlink(scratch, NEW_ROOT + "/tmp")  # where programs expect it
    _mount(None, NEW_ROOT, None, AGAIN | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(NEW_ROOT)
    _check(LIBC.pivot_root(b".", b"."), "pivot_root")  # the old root now lies on top of the new one
    _check(LIBC.umount2(b".", DETACH), "umount2")


def _unshare(namespaces: int) -> None:
    _check(LIBC.unshare(namespaces), "unshare")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    names = (source, target, kind, options)
    source_, target_, kind_, options_ = (None if name is None else os.fsencode(name) for name in names)
    done = LIBC.mount(source_, target_, kind_, ctypes.c_ulong(flags), options_)
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
