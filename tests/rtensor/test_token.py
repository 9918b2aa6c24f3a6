"""The token goes only to processes that this process was given, never to a host that only a handle names."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from support.distributed.rank_processes import Job, Line
from support.rtensor import peer_functions
from support.rtensor.peers import Peer

from tundish import rtensor


class Listener:
    """Notes what it is asked, and answers that all is well."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.addr = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        with connection:
            self.heard.append(connection.recv(1 << 16))
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\n{"a":1}')

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def drain_what_a_stranger_owns(rank: int, line: Line) -> None:
    import torch

    from tundish import rtensor

    rtensor.serve(token="of-the-job")
    listener = Listener()
    shard = rtensor.TensorShardInfo("name", listener.addr)
    rtensor.drain(claim=rtensor.RTensor(shard, torch.empty(3, device="meta")))
    listener.close()
    line.say(b"DELETE /data/clear" in listener.heard[0], b"of-the-job" in listener.heard[0])


def test_a_drain_shows_the_token_to_no_host_that_a_handle_names(tmp_path: Path) -> None:
    with Job(drain_what_a_stranger_owns, 1, tmp_path) as job:
        assert job.hear_all() == [(True, False)]
        job.expect_end()


def remove_what_others_own(handles: list[rtensor.RTensor]) -> None:
    from tundish.rtensor.steps import remove_claimed
    from tundish.rtensor.tensor_store import default_store

    remove_claimed(default_store.shards, default_store.own_addresses(), rtensor.collect_shards(handles))


@pytest.mark.parametrize("is_told", [True, False])
def test_trusted_owners_get_the_token(is_told: bool) -> None:
    with Peer(token="of-the-job") as owner, Peer(token="of-the-job") as other:
        handles = owner.call(peer_functions.make, 2, 10)
        if is_told:
            other.call(peer_functions.trust, owner.addr, "of-the-job")
            other.call(remove_what_others_own, handles)
            assert owner.call(peer_functions.stats)[0]["num_tensors"] == 0
        else:
            with pytest.raises(Exception, match="wants the token"):
                other.call(remove_what_others_own, handles)
