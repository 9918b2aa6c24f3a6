"""A server that the system has nothing left for."""

from __future__ import annotations

from support.distributed.programs import run

# Of a user whose processes nobody else has: root's are not limited.
WITHOUT_THREADS = """
import errno, os, resource, signal
from tundish import rtensor
from tundish.errors import StorageError

rtensor.serve().close()
if os.getuid() == 0:
    os.setuid(54321)
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, most))
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
try:
    rtensor.serve()
except StorageError as error:
    assert error.errno == errno.EAGAIN and "start threads to serve" in str(error), error
else:
    raise AssertionError("it serves without a thread")
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked, "it takes no signals any more"
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
rtensor.serve().close()
print("served")
"""


def test_a_server_without_a_thread_is_an_error_and_starts_when_there_is_one() -> None:
    ended = run(["-c", WITHOUT_THREADS])
    assert (ended.stdout, ended.stderr, ended.returncode) == ("served\n", "", 0)
