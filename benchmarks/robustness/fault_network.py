"""Gives every node a network of its own, and a switch that loses, delays, reorders and duplicates frames.

Every node gets a network namespace with one TAP device. A thread reads the frames of all of them and passes them on. So
libp2p and the kernel's TCP meet what they would meet on a bad line, and no kernel module is needed.
"""

import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

TUNSETIFF, TAP, NO_PACKET_INFO = 0x400454CA, 0x0002, 0x1000
MAC = b"\x02\xfb\x00\x00\x00"
OVERTAKEN = 0.03  # delay in seconds of a frame that others overtake
LONGEST_FRAME = 2048
MAX_HELD = 20_000  # frames in flight; more are dropped, as on a real link


@dataclass(frozen=True)
class Line:
    """Says what happens to the frames of one node, in both directions."""

    cut: int = 0  # other nodes are reached only with the same number
    loss: float = 0.0  # share of frames
    delay: float = 0.0  # seconds
    reorder: float = 0.0  # share of frames that others overtake
    duplicate: float = 0.0  # share of frames that come twice


class FrameFates:
    """Draws the fate of every single frame from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed).random

    def of(self, one: Line, other: Line) -> list[float]:
        """Return after how many seconds a frame between two nodes arrives: never, once or twice."""
        if one.cut != other.cut or self.chance() < one.loss or self.chance() < other.loss:
            return []
        seconds = one.delay + other.delay
        if self.chance() < one.reorder + other.reorder:
            seconds += OVERTAKEN
        return [seconds] * (2 if self.chance() < one.duplicate + other.duplicate else 1)


class Wires:
    """Holds the namespaces and the switch between them, inside namespaces of this process's own."""

    def __init__(self, seed: int) -> None:
        self.fates = FrameFates(seed)
        self.lines: dict[str, Line] = {}
        self._taps: dict[int, tuple[str, int]] = {}  # by number: node and descriptor
        self._carried = 0
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._on_their_way: list[tuple[float, int, int, bytes]] = []
        self._closing = threading.Event()
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)  # where `ip` keeps namespaces
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def add(self, node: str) -> tuple[str, list[str]]:
        """Add a node's namespace; return its address there, and the prefix of a command that runs in it."""
        number = len(self._taps) + 1
        device, space, address = f"tap{number}", f"node{number}", f"10.99.0.{number}"
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), TAP | NO_PACKET_INFO))
        for words in (
            f"netns add {space}",
            f"link set {device} address {(MAC + bytes([number])).hex(':')}",
            f"link set {device} netns {space}",
            f"-n {space} link set lo up",
            f"-n {space} addr add {address}/24 dev {device}",
            f"-n {space} link set {device} up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        with self._lock:
            self._taps[number] = (node, tap)
            self.lines.setdefault(node, Line())
            self._selector.register(tap, selectors.EVENT_READ, number)
        return address, ["nsenter", f"--net=/run/netns/{space}"]

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for _, tap in self._taps.values():
            os.close(tap)

    def _carry(self) -> None:
        while not self._closing.is_set():
            due = self._on_their_way[0][0] - time.monotonic() if self._on_their_way else 0.1
            for key, _ in self._selector.select(max(0.0, min(due, 0.1))):
                with suppress(BlockingIOError):
                    while True:
                        self._take(key.data, os.read(key.fd, LONGEST_FRAME))
            while self._on_their_way and self._on_their_way[0][0] <= time.monotonic():
                _, _, number, frame = heapq.heappop(self._on_their_way)
                with suppress(OSError):  # its queue is full
                    os.write(self._taps[number][1], frame)

    def _take(self, sender: int, frame: bytes) -> None:
        to_all = frame[0] & 1
        with self._lock:
            receivers = [n for n in self._taps if n != sender and (to_all or frame[:6] == MAC + bytes([n]))]
        for receiver in receivers:
            here, there = (self.lines[self._taps[number][0]] for number in (sender, receiver))
            for seconds in self.fates.of(here, there):
                if len(self._on_their_way) < MAX_HELD:
                    self._carried += 1
                    due = time.monotonic() + seconds
                    heapq.heappush(self._on_their_way, (due, self._carried, receiver, frame))
