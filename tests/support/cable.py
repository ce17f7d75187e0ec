"""Shell. A network cable between a client and a server on this machine, which a test can cut at the moment it wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 65_536


class Cable:
    """Listens on a port of its own and carries every connection to the server's port."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_questions = False
        """Cut a connection, once, at the client's next bytes, before they reach the server."""
        self.cut_answers = False
        """Cut a connection, once, at the server's next bytes, before they reach the client."""
        self.hold_questions = False
        """Cut a connection, once, at the client's next bytes; they reach the server after `deliver`."""
        self.hold_at = b""
        """Keep the piece of a question that has these bytes, once, and what follows it, until `deliver`."""
        self.swallow_questions = self.swallow_answers = False
        """Drop this direction without a reset: a hole in a firewall."""
        self._generation = 0
        """Of the connections that are made now; older ones are forgotten."""
        self.is_holding = threading.Event()
        self._is_delivered = threading.Event()
        self._is_lost = False
        self._carried: set[tuple[socket.socket, socket.socket]] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def deliver(self, *, lost: bool = False) -> None:
        """Deliver the bytes that `hold_questions` keeps; with `lost`, cut the server's connection instead."""
        self._is_lost = lost
        self._is_delivered.set()

    def repair(self) -> None:
        """Carry both directions again, on new connections: behind what was swallowed, the rest makes no sense."""
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
                client.close()  # there is no server at this moment
                continue
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Carry both directions, each on a thread. Who cuts does not close: the number of a socket that the other one
        is about to read could be another connection's by then."""
        with client, server:
            generation = self._generation
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
                    return  # the pump of answers ends with the server's connection
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
                break  # it is cut, or the server died
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
                break  # it is cut
        _cut(client, server)


@contextmanager
def cable_to(server_port: int) -> Iterator[Cable]:
    cable = Cable(server_port)
    try:
        yield cable
    finally:
        cable.close()


def _pieces(end: socket.socket) -> Iterator[bytes]:
    try:
        while piece := end.recv(PIECE_BYTES):
            yield piece
    except OSError:
        return  # the other direction cut it


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is cut already
