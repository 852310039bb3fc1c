"""Moves a process into its own namespaces: no network, no other processes, a nearly empty file system.

It does what bubblewrap does, by system calls, so that nothing needs to be installed: new namespaces, a root in memory
with Python's library (read-only) and a mount point for a writable folder, and no capabilities. Root can do this where
it may mount; an ordinary user where the kernel offers unprivileged user namespaces.

The process inside may not mount. Its parent stays outside, keeps that capability, and mounts and unmounts the scratch
file system on request (`ScratchMount`): so every program gets an empty one.
"""

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Sequence

from rl_swarm.scoring.lockdown import LIBC

# As in <linux/sched.h>, <sys/mount.h> and <linux/capability.h>.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 1 << 17, 1 << 26, 1 << 27
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 28, 1 << 29, 1 << 30
NOBODY = 65534
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
# Flags of statvfs, and the flags of mount that keep them.
FLAGS_KEPT = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
NEW_ROOT = "/dev"  # a mount point for the new root: it exists on every Linux, and holds no library
MNT_DETACH = 2
CAP_SYS_ADMIN = 1 << 21  # the capability to mount
MOUNT, UNMOUNT, DONE = b"+", b"-", b"."


class ScratchMount:
    """Requests the scratch file system from the process outside."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests

    def mount(self) -> None:
        """Mount a new file system; even its timestamps reveal nothing of the last one."""
        self.requests.send(MOUNT)
        if (answer := self.requests.recv(200)) != DONE:
            raise OSError(answer.decode(errors="replace") or "the process that mounts has ended")

    def unmount(self) -> None:
        """Request the unmount without waiting; the next request is served after it."""
        self.requests.send(UNMOUNT)


def enter_namespaces(library: Sequence[str], scratch: str, options: str) -> ScratchMount:
    """Return in a forked child, the first process inside. This process mounts for it, and ends with it."""
    was_root = os.geteuid() == 0
    as_nobody = False
    if was_root:
        try:
            _unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
            as_nobody = True
        except OSError:  # possibly root of a container that may not mount
            was_root = False
    if not was_root:
        user, group = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    served, requests = socket.socketpair()
    child = os.fork()
    if child:
        requests.close()
        try:
            drop_capabilities(CAP_SYS_ADMIN)
            _serve_mounts(served, scratch, options)
        finally:
            served.close()  # ends the process inside, if it still runs
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    served.close()
    socket.sethostname("sandbox")
    _build(library, scratch)
    if as_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()
    _check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # when the process outside ends, all inside end
    return ScratchMount(requests)


def drop_capabilities(keep: int = 0) -> None:
    _check(LIBC.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", keep, keep, 0, 0, 0, 0)), "capset")


def _serve_mounts(served: socket.socket, scratch: str, options: str) -> None:
    """Mount and unmount on request until the process inside ends. Both see the same mounts."""
    while request := served.recv(1):
        if request == UNMOUNT:
            _check(LIBC.umount2(os.fsencode(scratch), MNT_DETACH), "umount2")
            continue
        try:
            _mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        except OSError as error:
            served.send(str(error).encode()[:200])
        else:
            served.send(DONE)


def _build(library: Sequence[str], scratch: str) -> None:
    _mount(None, "/", None, MS_REC | MS_PRIVATE)  # mounts made here are invisible outside
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in library:
        inside = NEW_ROOT + path
        os.makedirs(inside)
        _mount(path, inside, None, MS_BIND | MS_REC)
        kept = sum(flag for seen, flag in FLAGS_KEPT.items() if os.statvfs(inside).f_flag & seen)
        _mount(None, inside, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)
    os.makedirs(NEW_ROOT + scratch)
    if not os.path.lexists(NEW_ROOT + "/tmp"):
        os.symlink(scratch, NEW_ROOT + "/tmp")  # where programs expect it
    _mount(None, NEW_ROOT, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(NEW_ROOT)
    _check(LIBC.pivot_root(b".", b"."), "pivot_root")  # the old root now lies on top of the new one
    _check(LIBC.umount2(b".", MNT_DETACH), "umount2")


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
