"""A directory that others write to is reached without following a link, waiting for a pipe or leaving the directory.

Every test runs with the kernel's `openat2` and without it, as this user and, where this is root, as an ordinary one.
"""

import errno
import os
import stat
import sys
import traceback
from pathlib import Path

import pytest

from rl_swarm.storage import beneath
from rl_swarm.storage.files import Changed, LocalFiles
from rl_swarm.storage.shared_log import REPAIR_SECONDS, SharedLog

NOBODY = 65534


@pytest.fixture(params=["openat2", "one component at a time"])
def resolved(request, monkeypatch):
    if request.param != "openat2":
        monkeypatch.setattr(beneath, "_without_openat2", True)
    elif beneath._without_openat2:
        pytest.skip("this kernel has no openat2")


@pytest.fixture(params=["this user", "an ordinary user"])
def act(request, resolved, tmp_path):
    """Runs a function of the test's folder, in a process of an ordinary user where that is asked for."""
    if request.param == "this user":
        return lambda play: play(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            os.chmod(folder, 0o755)
    os.chown(tmp_path, NOBODY, NOBODY)

    def as_nobody(play):
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                play(tmp_path)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    return as_nobody


def outside(folder):
    """Something precious beside the swarm's folder."""
    (folder / "outside" / "round_0").mkdir(parents=True)
    (folder / "outside" / "precious").write_bytes(b"mine")
    (folder / "outside" / "round_0" / "precious").write_bytes(b"mine")
    return folder / "outside"


def is_untouched(place):
    found = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
    assert found == ["precious", "round_0", "round_0/precious"]
    assert (place / "precious").read_bytes() == (place / "round_0" / "precious").read_bytes() == b"mine"


def test_nothing_is_read_through_a_link(act):
    def play(folder):
        place, files = outside(folder), LocalFiles(folder / "swarm")
        files.make()
        (folder / "swarm" / "link").symlink_to(place)
        (folder / "swarm" / "file").symlink_to(place / "precious")
        (folder / "swarm" / "nowhere").symlink_to("/nowhere/at/all")
        for path in ("link/precious", "file", "nowhere", "link/round_0/precious", "../outside/precious", "/etc/passwd"):
            with pytest.raises(OSError):
                files.read(path, 100)
            with pytest.raises(OSError):
                files.stat(path)
        assert files.names("link") == [] and not files.has_folder("link")
        is_untouched(place)

    act(play)


@pytest.mark.parametrize("relative", [False, True])
def test_nothing_is_written_moved_or_removed_through_a_link(act, relative):
    def play(folder):
        place, files = outside(folder), LocalFiles(folder / "swarm")
        files.make()
        target = "../outside" if relative else str(place)

        def lay(name):
            files.remove(name)
            (folder / "swarm" / name).symlink_to(target)

        lay("rollouts")
        files.remove("rollouts/round_0")
        is_untouched(place)
        files.write("rollouts/round_0/stage_0/ann.json", b"new")
        is_untouched(place)
        assert not (folder / "swarm" / "rollouts").is_symlink()
        lay("archives")
        files.move("rollouts/round_0", "archives/round_0")
        is_untouched(place)
        assert files.read("archives/round_0/stage_0/ann.json", 10) == b"new"
        lay("logs")
        files.append("logs/ann/metrics.jsonl", b"line\n")
        is_untouched(place)
        lay("rollouts")
        files.remove("rollouts")
        is_untouched(place)
        (folder / "swarm" / "state.json").symlink_to(place / "precious")
        files.write("state.json", b"{}")
        is_untouched(place)
        files.make()
        (folder / "swarm" / "tree").mkdir()
        (folder / "swarm" / "tree" / "link").symlink_to(target)
        files.remove("tree")
        is_untouched(place)

    act(play)


def test_a_folder_that_becomes_a_link_after_the_start_is_not_followed(act):
    def play(folder):
        place, files = outside(folder), LocalFiles(folder / "drive" / "experiments" / "first")
        files.write("peers/ann.json", b"{}")
        os.rename(folder / "drive" / "experiments" / "first", folder / "drive" / "experiments" / "moved")
        (folder / "drive" / "experiments" / "first").symlink_to(place)
        for call in (lambda: files.write("precious", b"x"), lambda: files.append("precious", b"x")):
            with pytest.raises(OSError):
                call()
        with pytest.raises(OSError):
            LocalFiles(folder / "drive" / "experiments" / "first").read("precious", 10)
        is_untouched(place)
        os.rename(folder / "drive", folder / "elsewhere")
        (folder / "drive").symlink_to(folder / "elsewhere")
        if not beneath._without_openat2:  # the user named the drive before it was a link
            with pytest.raises(OSError):
                files.write("peers/bob.json", b"{}")

    act(play)


def test_pipes_devices_and_hard_links_are_refused_at_once(act):
    def play(folder):
        place, files = outside(folder), LocalFiles(folder / "swarm")
        files.make()
        os.mkfifo(folder / "swarm" / "pipe")
        os.link(place / "precious", folder / "swarm" / "same")
        (folder / "swarm" / "directory").mkdir()
        for path in ("pipe", "directory"):
            with pytest.raises(OSError):
                files.read(path, 10)
        reader = os.open(folder / "swarm" / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # somebody waits at its other end
        for path in ("pipe", "same", "directory"):
            with pytest.raises(OSError):
                files.append(path, b"line\n")
        assert os.read(reader, 10) == b"", "nothing came through"
        os.close(reader)
        files.write("same", b"new")
        is_untouched(place)

    act(play)


def test_permissions_that_were_taken_away_come_back_where_they_are_ours(act):
    def play(folder):
        files = LocalFiles(folder / "swarm")
        files.write("rollouts/round_1/ann.json", b"1")
        for path in ("rollouts/round_1", "rollouts"):
            os.chmod(folder / "swarm" / path, 0)
        files.write("rollouts/round_1/ann.json", b"2")
        assert files.read("rollouts/round_1/ann.json", 10) == b"2"
        os.chmod(folder / "swarm" / "rollouts" / "round_1" / "ann.json", 0)
        files.write("rollouts/round_1/ann.json", b"3")
        assert files.read("rollouts/round_1/ann.json", 10) == b"3"

    act(play)


def test_files_of_any_date_are_read_and_replaced(act):
    def play(folder):
        files = LocalFiles(folder / "swarm")
        for moment in (0, 1 << 33, -(1 << 31)):
            files.write("peers/ann.json", b"old")
            os.utime(folder / "swarm" / "peers" / "ann.json", (moment, moment))
            assert files.read("peers/ann.json", 10) == b"old"
            files.write("peers/ann.json", b"new")
            assert files.read("peers/ann.json", 10) == b"new"

    act(play)


def test_a_tree_of_any_depth_is_removed_or_refused_within_bounds(act):
    def play(folder):
        files = LocalFiles(folder / "swarm")
        files.make()
        here = os.getcwd()
        os.chdir(folder / "swarm")
        for _ in range(300):
            os.mkdir("d")
            os.chdir("d")
        os.chdir(here)
        opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        with pytest.raises(OSError):
            files.remove("d")
        if opened:
            assert len(os.listdir("/proc/self/fd")) == opened

    act(play)


def test_a_directory_is_copied_whole_and_comes_back_as_it_was(act):
    def play(folder):
        private, files = folder / "private", LocalFiles(folder / "swarm")
        (private / "templates").mkdir(parents=True)
        (private / "model").write_bytes(b"weights" * 1000)
        (private / "templates" / "chat").write_bytes(b"{{ x }}")
        place = outside(folder)
        files.make()
        (folder / "swarm" / "checkpoints").symlink_to(place)
        files.copy_in(private, "checkpoints/round_0/ann")
        files.copy_in(private, "checkpoints/round_0/ann")
        is_untouched(place)
        import hashlib

        wanted = {
            name: (len(data), hashlib.sha256(data).hexdigest())
            for name, data in {"model": b"weights" * 1000, "templates/chat": b"{{ x }}"}.items()
        }
        (folder / "back").mkdir()
        files.copy_out("checkpoints/round_0/ann", folder / "back", wanted)
        assert (folder / "back" / "templates" / "chat").read_bytes() == b"{{ x }}"
        (folder / "again").mkdir()
        for name in ("../escape", "/etc/passwd"):
            with pytest.raises(OSError):
                files.copy_out("checkpoints/round_0/ann", folder / "again", {name: (1, "")})

    act(play)


def test_a_log_is_whole_in_private_and_its_copy_is_repaired_now_and_then(act):
    def play(folder):
        now, files = [0.0], LocalFiles(folder / "swarm")
        log = SharedLog(folder / "private" / "log", files, "logs/ann/log", clock=lambda: now[0])
        copy = folder / "swarm" / "logs" / "ann" / "log"
        log.append(b"one\n")
        log.append(b"two\n")
        assert copy.read_bytes() == b"one\ntwo\n"
        attacks = [
            lambda: copy.write_bytes(b"lies\n"),
            lambda: copy.unlink(),
            lambda: (copy.unlink(), os.mkfifo(copy)),
            lambda: (copy.unlink(), copy.symlink_to(folder / "private" / "log")),
            lambda: (copy.unlink(), copy.mkdir()),
            lambda: (copy.rmdir() if copy.is_dir() else copy.unlink(), os.chmod(copy.parent, 0)),
        ]
        for number, attack in enumerate(attacks):
            now[0] += 2 * REPAIR_SECONDS
            attack()
            log.append(b"%d\n" % number)
            log.append(b"next\n")
            assert copy.read_bytes() == log.read() == (folder / "private" / "log").read_bytes(), number
            attack()
            log.append(b"again\n")  # not at once: an attacker would make a node write its log all the time
            now[0] += 2 * REPAIR_SECONDS
            log.append(b"later\n")
            assert copy.read_bytes() == log.read()
        (folder / "private" / "log").write_bytes(log.read() + b"cut off by a cra")
        again = SharedLog(folder / "private" / "log", files, "logs/ann/log")
        assert again.read() == log.read() and again.sha256.hexdigest() == log.sha256.hexdigest()

    act(play)


def test_a_file_of_another_size_is_not_added_to(act):
    def play(folder):
        files = LocalFiles(folder / "swarm")
        files.append("log", b"one\n", at=0)
        with pytest.raises(Changed):
            files.append("log", b"two\n", at=3)
        files.append("log", b"two\n", at=4)
        assert files.read("log", 100) == b"one\ntwo\n"

    act(play)


def test_no_path_leads_out_of_the_folder(act):
    def play(folder):
        place, files = outside(folder), LocalFiles(folder / "swarm")
        files.write("a/b", b"x")
        for path in ("..", "a/../..", "../outside", "/" + str(place), "a/../../outside"):
            for call in (files.remove, files.remove_if_empty, files.names, lambda p: files.move(p, "c"), files.stat):
                with pytest.raises(OSError):
                    call(path)
                is_untouched(place)
        inner = files.below("a").below("deeper")
        inner.write("x", b"y")
        assert files.read("a/deeper/x", 10) == b"y" and inner.root == folder / "swarm" / "a" / "deeper"

    act(play)


def test_a_link_that_may_be_the_users_own_is_named_and_stays(act):
    def play(folder):
        place = outside(folder)
        (folder / "experiments").symlink_to(place)
        files = LocalFiles(folder / "experiments" / "new")
        with pytest.raises(OSError, match="links in a shared folder are not followed"):
            files.make()
        assert (folder / "experiments").is_symlink()
        is_untouched(place)

    act(play)


def test_a_disk_that_is_full_leaves_whole_lines(act):
    def play(folder):
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = SharedLog(folder / "private" / "log")
        log.append(b"a" * 90 + b"\n")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError):
                log.append(b"b" * 90 + b"\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.append(b"c\n")
        assert (folder / "private" / "log").read_bytes() == log.read() == b"a" * 90 + b"\nc\n"

    act(play)


def test_errors_name_what_was_asked_for_and_not_what_others_called_their_files(act):
    def play(folder):
        files = LocalFiles(folder / "swarm")
        for place in ("old", "new"):
            files.write(f"{place}/kept", b"x")
            deep = folder / "swarm" / place
            for _ in range(beneath.MAX_DEPTH + 1):
                deep = deep / "$(id)\x1b[31m"
                deep.mkdir()
        for call in (lambda: files.remove("old"), lambda: files.move("old", "new")):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.filename == "old" and "$(" not in str(caught.value)

    act(play)


def test_the_folder_itself_is_no_file(act):
    def play(folder):
        files = LocalFiles(folder / "swarm")
        files.write("x", b"x")
        for call in (lambda: files.write("", b"x"), lambda: files.append(".", b"x"), lambda: files.move("x", "")):
            with pytest.raises(IsADirectoryError):
                call()

    act(play)


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
def test_a_directory_that_cannot_be_looked_at_is_closed_again(act, monkeypatch):
    def play(folder):
        files, fstat = LocalFiles(folder / "swarm"), os.fstat
        files.write("a/b/c", b"x")
        before = len(os.listdir("/proc/self/fd"))

        def failing(file):
            if not stat.S_ISREG(fstat(file).st_mode):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return fstat(file)

        monkeypatch.setattr(os, "fstat", failing)
        for _ in range(3):
            files.write("a/b/c", b"x")
        monkeypatch.setattr(os, "fstat", fstat)
        assert len(os.listdir("/proc/self/fd")) == before

    act(play)
