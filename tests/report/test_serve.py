"""The server of `dew view` among connections of others."""

import socket
import threading
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from dew.report import serve
from dew.run.folder import RunFolder


def test_the_server_of_dew_view_outlives_idle_connections_and_checks_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "IDLE", 0.5)
    RunFolder(tmp_path).append_metrics({"step": 1, "reward": 0.5})
    server, address = serve.make_server([tmp_path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    idle = [socket.create_connection(server.server_address, timeout=20) for _ in range(70)]
    try:
        assert urlopen(f"{address}stamp", timeout=20).status == 200
        assert all(connection.recv(1) == b"" for connection in idle)  # closed by the server
        assert urlopen(Request(f"{address}stamp", headers={"Host": "localhost:99"})).status == 200  # a tunnel
        with pytest.raises(HTTPError):
            urlopen(Request(f"{address}stamp", headers={"Host": f"evil.example:{server.server_port}"}))
    finally:
        for connection in idle:
            connection.close()
        server.shutdown()
        server.server_close()
