"""Segments that are reached over a socket: of a process that may not be looked at, or by one that can open no more.

A process that has changed its user may not be looked at by others of that user, so `/proc` leads nowhere. All that it
needs it has to import before: what root installed is perhaps not for others to read.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from support.distributed.rank_processes import send_signal

from actors import PROLOGUE, Actor, Refused

NOBODY = 65534
AS_NOBODY = (
    PROLOGUE
    + f"""
import base64, logging, multiprocessing.context, pickle, resource, socket
logs = []
class Kept(logging.Handler):
    def emit(self, record):
        logs.append((record.levelname, record.name, record.getMessage()))
logging.getLogger("tundish.shm").addHandler(Kept())
logging.getLogger("tundish.shm").propagate = False
os.setuid({NOBODY})
"""
)
GIVE = "answer = base64.b64encode(pickle.dumps(held.handle)).decode()"
TAKE = "read = SharedArray.attach(pickle.loads(base64.b64decode({handle!r})))"


@pytest.fixture
def owner() -> Iterator[Actor]:
    with Actor(AS_NOBODY) as owner:
        owner.does("held = SharedArray.create(100000, np.int64); held.array[:] = 7")
        yield owner


@pytest.fixture
def reader() -> Iterator[Actor]:
    with Actor(AS_NOBODY) as reader:
        yield reader


def socket_of(handle: str) -> str:
    """The name of the socket that a handle carries."""
    name = pickle.loads(base64.b64decode(handle))._socket_name
    assert isinstance(name, str)
    return name


def test_where_proc_leads_nowhere_the_owner_sends_a_descriptor(owner: Actor, reader: Actor) -> None:
    with pytest.raises(Refused, match="Permission denied"):
        reader.does(f"os.listdir('/proc/{owner.pid}/fd')")
    handle = owner.does(GIVE)
    reader.does(TAKE.format(handle=handle))
    owner.does("held.array[3] = 11")
    assert reader.does(
        "answer = (int(read.array[3]), int(read.array[4]), read.array.flags.writeable, logs)"
    ) == [
        11,
        7,
        False,
        [],
    ]
    # The reader has a lease of its own: the memory is not used again.
    owner.does("held.close(); del held; other = SharedArray.from_array(np.zeros(100000, np.int64))")
    assert reader.does("answer = int(read.array.sum())") == 7 * 99999 + 11
    # When it is used again, the handle leads to nothing.
    reader.does("read.close(); del read")
    owner.does("other.close(); other = SharedArray.from_array(np.zeros(100000, np.int64))")
    owner.does("another = SharedArray.from_array(np.zeros(100000, np.int64))")
    with pytest.raises(Refused, match="given it back") as gone:
        reader.does(TAKE.format(handle=handle))
    assert gone.value.kind == "SegmentGoneError"


def test_who_can_open_no_more_gets_a_copy_and_a_warning(owner: Actor) -> None:
    with Actor("import tundish.shm.tensors\n" + AS_NOBODY) as reader:
        who_can_open_no_more(owner, reader)


def who_can_open_no_more(owner: Actor, reader: Actor) -> None:
    handle = owner.does(GIVE)
    # One descriptor is left: for the socket, and none for what comes over it.
    reader.does(
        "spare = os.dup(0); limit = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limit[1])); os.close(spare)"
    )
    reader.does(TAKE.format(handle=handle))
    reader.does("resource.setrlimit(resource.RLIMIT_NOFILE, limit)")
    level, name, message = reader.does("answer = logs.pop()")
    assert (level, name) == ("WARNING", "tundish.shm")
    assert "800,000 bytes" in message
    assert f"process {owner.pid}" in message
    assert reader.does("answer = (read.array.tolist() == [7] * 100000, read.array.flags.writeable)") == [
        True,
        False,
    ]
    owner.does("held.array[:] = 8")
    assert reader.does("answer = int(read.array[0])") == 7, "it is a copy"
    # A tensor may be written to, and the array does not see it.
    assert reader.does("tensor = read.tensor(); tensor[0] = 1; answer = int(read.array[0])") == 7
    with pytest.raises(Refused, match="private copy"):
        reader.does("read.handle")


def test_who_can_open_nothing_at_all_is_told_what_was_tried(owner: Actor, reader: Actor) -> None:
    handle = owner.does(GIVE)
    reader.does(
        "spare = os.dup(0); limit = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limit[1])); os.close(spare)"
    )
    with pytest.raises(Refused, match="Tried: ") as refused:
        reader.does(TAKE.format(handle=handle))
    assert socket_of(handle) in refused.value.message
    assert "Too many open files" in refused.value.message


def test_another_user_is_not_answered(owner: Actor) -> None:
    handle = owner.does(GIVE)
    with Actor(AS_NOBODY.replace(str(NOBODY), str(NOBODY - 1))) as stranger:
        with pytest.raises(Refused, match="Tried: ") as refused:
            stranger.does(TAKE.format(handle=handle))
        assert refused.value.kind == "SegmentGoneError"
    # And nothing is lost by that.
    with Actor(AS_NOBODY) as reader:
        reader.does(TAKE.format(handle=handle))


def test_another_user_is_not_asked(owner: Actor, reader: Actor) -> None:
    """A socket that anybody may have opened under the name in a handle."""
    address = pickle.loads(base64.b64decode(owner.does(GIVE)))._address
    from tundish.shm import Handle

    trap = socket.socket(socket.AF_UNIX)
    name = f"tundish-trap-{os.getpid()}"
    trap.bind(f"\0{name}")
    trap.listen()
    with trap:
        forged = Handle(address, None, name)
        text = base64.b64encode(pickle.dumps(forged)).decode()
        with pytest.raises(Refused, match="it is another user's"):
            reader.does(TAKE.format(handle=text))
        taken, _ = trap.accept()
        with taken:
            assert taken.recv(100) == b"", "nothing was asked"


def test_ctrl_c_ends_the_wait_for_an_owner_that_is_stopped(owner: Actor, reader: Actor) -> None:
    handle = owner.does(GIVE)
    send_signal(owner.pid, signal.SIGSTOP)
    try:
        reader.tell(TAKE.format(handle=handle))
        time.sleep(0.5)
        os.kill(reader.pid, signal.SIGINT)
        began = time.monotonic()
        with pytest.raises(Refused) as interrupted:
            reader.hear()
        assert interrupted.value.kind == "KeyboardInterrupt"
        # 0.1 s where the machine has nothing else to do.
        assert time.monotonic() - began < 3
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    # Who asked and left harms nobody.
    reader.does(TAKE.format(handle=handle))


def test_a_child_of_the_owner_does_not_keep_the_socket(owner: Actor, reader: Actor) -> None:
    handle = owner.does(GIVE)
    child = owner.does(
        "reading, writing = os.pipe()\n"
        "answer = os.fork()\n"
        "if answer == 0:\n"
        "    os.write(writing, b'1')\n"
        "    signal.pause()\n"
        "    os._exit(0)\n"
        # Only once fork is over in the child, too, has that closed the socket.
        "os.read(reading, 1)"
    )
    owner.kill()
    try:
        began = time.monotonic()
        with pytest.raises(Refused, match="Connection refused"):
            reader.does(TAKE.format(handle=handle))
        assert time.monotonic() - began < 5
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_lends_at_a_socket_of_its_own(owner: Actor, reader: Actor) -> None:
    parents = socket_of(owner.does(GIVE))
    own = owner.does(
        "reading, writing = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    mine = SharedArray.from_array(np.full(10, 5))\n"
        "    os.write(writing, base64.b64encode(pickle.dumps(mine.handle)))\n"
        "    os.close(writing)\n"
        "    signal.pause()\n"
        "    os._exit(0)\n"
        "os.close(writing)\n"
        "answer = os.read(reading, 10000).decode()"
    )
    try:
        assert socket_of(own) != parents
        reader.does(TAKE.format(handle=own))
        assert reader.does("answer = int(read.array.sum())") == 50
    finally:
        owner.does("os.kill(child, 9); os.waitpid(child, 0)")


def test_what_says_nothing_or_nonsense_keeps_nobody_waiting(owner: Actor, reader: Actor) -> None:
    handle = owner.does(GIVE)
    # Connections of the same user, as many as are answered at once and more.
    reader.does(
        "silent = []\n"
        "for number in range(20):\n"
        "    silent.append(socket.socket(socket.AF_UNIX)); silent[-1].connect('\\0' + "
        + repr(socket_of(handle))
        + ")\n"
        "    if number % 2:\n"
        "        silent[-1].sendall(b'x' * 40)"
    )
    began = time.monotonic()
    reader.does(TAKE.format(handle=handle))
    assert time.monotonic() - began < 5


def test_a_reader_killed_while_it_asks_harms_nobody(owner: Actor, reader: Actor) -> None:
    handle = owner.does(GIVE)
    for _ in range(5):
        with Actor(AS_NOBODY) as victim:
            victim.tell(f"while True:\n    {TAKE.format(handle=handle)}\n    read.close(); del read")
            time.sleep(0.05)
            victim.kill()
    reader.does(TAKE.format(handle=handle))
    # Its leases went with it: what is given back can be used again.
    reader.does("read.close(); del read")
    before = owner.does("answer = held.handle._address[2]")
    owner.does("held.close(); del held; kept = []")
    # What was on its way to one that was killed the kernel drops some time after.
    until = time.monotonic() + 20
    again = "kept.append(SharedArray.create(100000, np.int64)); answer = kept[-1].handle._address[2]"
    while owner.does(again) != before:
        assert time.monotonic() < until
        time.sleep(0.1)
