"""Shell. A network cable between a client and a server on this machine, which a test can cut at the moment it wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 65_536


class Cable:
    """Listens on its own port and carries every connection to the server's port."""

    def __init__(self, server_port: int, port: int = 0) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.cut_questions = False
        """Cut a connection once, before the client's next bytes reach the server."""
        self.cut_answers = False
        """Cut a connection once, before the server's next bytes reach the client."""
        self.hold_questions = False
        """Cut a connection once at the client's next bytes, which reach the server after `deliver`."""
        self.hold_at = b""
        """Hold a request once, from the piece with these bytes on, until `deliver`."""
        self.swallow_questions = self.swallow_answers = False
        """Drop this direction without a reset, as a firewall does."""
        self._generation = 0
        """Number of new connections; older ones are forgotten."""
        self.is_holding = threading.Event()
        self._is_delivered = threading.Event()
        self._is_lost = False
        self._carried: set[tuple[socket.socket, socket.socket]] = set()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def deliver(self, *, lost: bool = False) -> None:
        """Deliver the held bytes; with `lost`, cut the server's connection instead."""
        self._is_lost = lost
        self._is_delivered.set()

    def repair(self) -> None:
        """Carry both directions again, on new connections, as the old ones lack the dropped bytes."""
        self.swallow_questions = self.swallow_answers = False
        for ends in list(self._carried):
            _cut(*ends)

    def forget(self) -> None:
        """Drop all bytes of the open connections without a reset."""
        self._generation += 1

    def close(self) -> None:
        self._is_delivered.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                client.close()  # no server at this moment
                continue
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Carry both directions, each on a thread. A cut does not close: the socket's number could belong to another
        connection before the other thread reads it.
        """
        with client, server:
            generation = self._generation
            self.connections += 1
            self._carried.add((client, server))
            answers = threading.Thread(target=self._answers, args=(client, server, generation), daemon=True)
            answers.start()
            self._questions(client, server, generation)
            answers.join()
            self._carried.remove((client, server))

    def _questions(self, client: socket.socket, server: socket.socket, generation: int) -> None:
        for piece in _pieces(client):
            if generation < self._generation or self.swallow_questions:
                continue
            if self.cut_questions:
                self.cut_questions = False
                break
            if self.hold_questions:
                self.hold_questions = False
                _cut(client)
                self.is_holding.set()
                self._is_delivered.wait()
                if not self._is_lost:
                    server.sendall(piece)
                    return  # the thread of answers ends with the server's connection
                break
            if self.hold_at and self.hold_at in piece:
                self.hold_at = b""
                self.is_holding.set()
                self._is_delivered.wait()
                if self._is_lost:
                    break
            try:
                server.sendall(piece)
            except OSError:
                break  # cut, or the server ended
        _cut(client, server)

    def _answers(self, client: socket.socket, server: socket.socket, generation: int) -> None:
        for piece in _pieces(server):
            if generation < self._generation or self.swallow_answers:
                continue
            if self.cut_answers:
                self.cut_answers = False
                break
            try:
                client.sendall(piece)
            except OSError:
                break  # cut
        _cut(client, server)


@contextmanager
def cable_to(server_port: int, port: int = 0) -> Iterator[Cable]:
    cable = Cable(server_port, port)
    try:
        yield cable
    finally:
        cable.close()


def _pieces(end: socket.socket) -> Iterator[bytes]:
    try:
        while piece := end.recv(PIECE_BYTES):
            yield piece
    except OSError:
        return  # the other direction was cut


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # cut already
