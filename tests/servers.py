"""Real servers on loopback for tests, and servers that fail in chosen ways.

``MlflowServer`` runs ``mlflow server`` over sqlite or PostgreSQL; ``Proxy`` stands before a server and spoils what goes
through it; ``BlackHole`` accepts connections and never answers.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import glob
import http.client
import http.server
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

HOST = "127.0.0.1"
START_S = 90.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no output)"


class Postgres:
    """A PostgreSQL server with an empty database of its own.

    The binaries are the machine's; where there are none and we are root, they are installed with apt-get.
    """

    def __init__(self) -> None:
        self._binaries = self._find() or self._install()
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="trainyard-pg-", dir="/tmp"))  # pytest's own is closed to postgres
        self._as_user: list[str] = []
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(self.folder, account.pw_uid, account.pw_gid)
            self._as_user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        try:
            self._run("initdb", "-D", str(self.folder / "data"), "-U", "mlflow", "--auth=trust", "-E", "UTF8", "-N")
            options = f"-p {self.port} -c listen_addresses={HOST} -c unix_socket_directories='{self.folder}'"
            self._run(
                "pg_ctl", "-D", str(self.folder / "data"), "-w", "-t", "60", "-l", str(self.folder / "log"),
                "-o", options, "start",
            )  # fmt: skip
            atexit.register(self.stop)
            self._run("createdb", "-h", HOST, "-p", str(self.port), "-U", "mlflow", "mlflow")
        except BaseException:
            self.stop()
            raise
        self.uri = f"postgresql+psycopg2://mlflow@{HOST}:{self.port}/mlflow"

    def stop(self) -> None:
        """Stop it and remove its data."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)

    @staticmethod
    def _find() -> Path | None:
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))
        where = found[-1] if found else shutil.which("postgres")
        return Path(where).parent if where else None

    @classmethod
    def _install(cls) -> Path:
        if os.getuid() != 0 or shutil.which("apt-get") is None:
            raise RuntimeError(
                "these tests need PostgreSQL's server: there is no /usr/lib/postgresql/*/bin/postgres, and only root can "
                "install it here; run: sudo apt-get install -y --no-install-recommends postgresql"
            )
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "postgresql"]):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"PostgreSQL cannot be installed: apt-get {' '.join(command)}: {done.stderr[-800:]}")
        found = cls._find()
        if found is None:
            raise RuntimeError("apt-get installed postgresql, and there is still no /usr/lib/postgresql/*/bin/postgres")
        return found

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._as_user, str(self._binaries / name), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if name != "pg_ctl" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT, text=True, cwd="/",
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"PostgreSQL's {name} failed: {(done.stdout or _tail(self.folder / 'log'))[-800:]}")


class MlflowServer:
    """``mlflow server`` on a port of loopback.

    Args:
        folder: for its database, artifacts and log.
        backend: ``sqlite``, or ``postgres``: a server of its own.
        auth: a user and password; it then runs MLflow's basic-auth app with this user as the administrator.

    Attributes:
        uri: what clients use as tracking URI.
        backend_uri: its database.
    """

    def __init__(self, folder: Path, backend: str = "sqlite", auth: tuple[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.uri = f"http://{HOST}:{self.port}"
        self._postgres = Postgres() if backend == "postgres" else None
        self.backend_uri = self._postgres.uri if self._postgres else f"sqlite:///{self.folder / 'mlflow.db'}"
        self._auth = auth
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> MlflowServer:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it did not; the message ends with its log.
        """
        log = self.folder / "server.log"
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", self.backend_uri, "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        if self._auth:
            user, password = self._auth
            settings = self.folder / "auth.ini"
            settings.write_text(
                "[mlflow]\ndefault_permission = READ\n"
                f"database_uri = sqlite:///{self.folder / 'auth.db'}\nadmin_username = {user}\n"
                f"admin_password = {password}\n"
                "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
            )
            environment |= {"MLFLOW_AUTH_CONFIG_PATH": str(settings), "MLFLOW_FLASK_SERVER_SECRET_KEY": "tests"}
            command += ["--app-name", "basic-auth"]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        atexit.register(self.kill)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                if answer.status == 200:
                    return self
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"mlflow server did not start:\n{_tail(log)}")

    def kill(self) -> None:
        """SIGKILL to it and all its children, as a power cut would."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it, its children and its database."""
        self._signal(signal.SIGTERM)
        if self._postgres is not None:
            self._postgres.stop()

    def restart(self) -> MlflowServer:
        """Kill it and start it again, on the same port and database."""
        self.kill()
        return self.start()

    def _signal(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever outlived its parent
        process.wait(10)
        atexit.unregister(self.kill)

    def __enter__(self) -> MlflowServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class BlackHole:
    """Accepts connections and never answers. ``uri`` is where."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self.uri = f"http://{HOST}:{self.port}"
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._swallow, name="black-hole", daemon=True)
        self._thread.start()

    def _swallow(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._held.append(self._listener.accept()[0])

    def stop(self) -> None:
        """Close it and all that it holds."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for held in self._held:
            held.close()

    def __enter__(self) -> BlackHole:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Proxy:
    """Forwards HTTP to a server, and fails as its switches say, each at once for the next request.

    Args:
        target: the server's URL.

    Attributes:
        uri: where it listens.
        delay_s: wait so long before a request is forwarded; it is forwarded even if the client has gone.
        status: answer with this HTTP status instead of forwarding.
        drop_answer: forward, then close the connection without an answer.
        refuse: close each connection at once.
        auth: a user and password; whoever does not give them gets a 401, as from MLflow's basic-auth app.
        only: the switches act on requests for which this is true of ``(method, path)``; None: on all.
        times: they act so many times more, then no longer; None: for ever.
        requests: the ``(method, path)`` of all requests that came.
        forwarded: how many of them the server answered.
    """

    def __init__(self, target: str) -> None:
        self._target = urllib.parse.urlsplit(target).netloc
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.forwarded = 0
        self.heal()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    if proxy.refuse and proxy.only is None and proxy._strikes("", ""):
                        proxy._reset(self)
                    else:
                        super().handle_one_request()
                    return
                self.close_connection = True

            def _pass(self) -> None:
                proxy._pass(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _pass

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_: object) -> None:
                pass

        self._server = Server((HOST, 0), Handler)
        self.port = self._server.server_port
        self.uri = f"http://{HOST}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True)
        self._thread.start()

    def heal(self) -> None:
        """All switches off."""
        self.delay_s = 0.0
        self.status: int | None = None
        self.drop_answer = False
        self.refuse = False
        self.auth: tuple[str, str] | None = None
        self.only: Callable[[str, str], bool] | None = None
        self.times: int | None = None

    def stop(self) -> None:
        """Close it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _strikes(self, method: str, path: str) -> bool:
        with self._lock:
            if (self.only is not None and not self.only(method, path)) or self.times == 0:
                return False
            if self.times is not None:
                self.times -= 1
            return True

    @staticmethod
    def _reset(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True

    def _pass(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = self._body(handler)
        self.requests.append((handler.command, handler.path))
        faulty = self.delay_s or self.status or self.drop_answer or self.refuse
        strikes = bool(faulty) and self._strikes(handler.command, handler.path.partition("?")[0])
        drop, delay_s, status, refuse = self.drop_answer, self.delay_s, self.status, self.refuse
        if strikes and refuse:
            self._reset(handler)
            return
        if strikes and delay_s:
            time.sleep(delay_s)
        if strikes and status:
            self._answer(handler, status, [("Content-Type", "text/plain")], b"as told")
            return
        if self.auth and handler.path.partition("?")[0] not in ("/health", "/version"):
            expected = "Basic " + base64.b64encode(":".join(self.auth).encode()).decode()
            if handler.headers.get("Authorization") != expected:
                text = b"You are not authenticated. Please see the MLflow documentation."
                self._answer(
                    handler, 401, [("Content-Type", "text/html"), ("WWW-Authenticate", 'Basic realm="mlflow"')], text
                )
                return
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP_BY_HOP}
        headers["Host"] = self._target
        connection = http.client.HTTPConnection(self._target, timeout=60)
        try:
            connection.request(handler.command, handler.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except OSError:
            self._answer(handler, 502, [("Content-Type", "text/plain")], b"the server is gone")
            return
        finally:
            connection.close()
        self.forwarded += 1
        if strikes and drop:
            self._reset(handler)
            return
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
        self._answer(handler, answer.status, kept, content)

    @staticmethod
    def _body(handler: http.server.BaseHTTPRequestHandler) -> bytes:
        if handler.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(handler.rfile.readline().split(b";")[0], 16):
                body += handler.rfile.read(size)
                handler.rfile.readline()
            handler.rfile.readline()
            return body
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))

    @staticmethod
    def _answer(
        handler: http.server.BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_HOP_BY_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "trailer", "upgrade"}
