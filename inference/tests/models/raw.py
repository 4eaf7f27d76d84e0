"""A model that speaks the protocol by hand, and wrongly where it is asked to. By its first item:
{"die": N, "cut": BYTES}: die of SIGKILL instead of sending frame N of the pass, or after BYTES of it;
{"instead": N, "bytes": HEX} or {"instead": N, "header": {…}, "blob": TEXT}: send this instead of frame N;
{"linger": true}: wait for the next message after the progress;
{"until": FILE}: wait for such a file after the progress;
{"late": N}: report progress of the pass N times after its end.
By the file WISH_FILE, which is removed when the wish is granted:
{"die_in": TYPE, "cut": BYTES}: die instead of sending a frame of this type, or after BYTES of it;
{"die_at": TYPE, "cut": BYTES}: die when a frame of this type comes, after reading BYTES of it."""

import json
import os
import signal
import socket
import struct
import time

connection = socket.socket(fileno=int(os.environ["VRAMQ_FD"]))


def read(size):
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise SystemExit
        data += piece
    return bytes(data)


def peek(size):
    """The first bytes that have come, without reading them."""
    while True:
        data = connection.recv(size, socket.MSG_PEEK | socket.MSG_WAITALL)
        if len(data) == size:
            return data
        if not data:
            raise SystemExit


def is_wished(key, kind):
    """The bytes before the death, if the file wishes it of a frame of this kind."""
    path = os.environ.get("WISH_FILE", "")
    if not os.path.exists(path):
        return None
    with open(path) as file:
        wish = json.load(file)
    if wish.get(key) != kind:
        return None
    os.remove(path)
    return wish.get("cut", 0)


def receive():
    (length,) = struct.unpack("<I", peek(4))
    header = json.loads(peek(4 + length)[4:])
    cut = is_wished("die_at", header["type"])
    if cut is not None:
        read(cut)
        die()
    read(4 + length)
    return header, [read(size) for size in header.pop("blobs", ())]


def frame(header, blob=None):
    if blob is not None:
        header = {**header, "blobs": [len(blob)]}
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + (blob or b"")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Sender:
    def __init__(self, wish, number=None):
        self.wish, self.number, self.count = wish, number, 0

    def send(self, header, blob=None):
        data = frame(header, blob)
        if self.wish.get("instead") == self.count:
            if "bytes" in self.wish:
                data = bytes.fromhex(self.wish["bytes"])
            else:
                header = dict(self.wish["header"])
                if header.get("pass") == "PASS":
                    header["pass"] = self.number
                blob = self.wish.get("blob")
                data = frame(header, None if blob is None else blob.encode())
        cut = self.wish.get("cut", 0) if self.wish.get("die") == self.count else is_wished("die_in", header["type"])
        if cut is not None:
            connection.sendall(data[:cut])
            die()
        self.count += 1
        connection.sendall(data)


def wish_of_ready():
    """By the variable WISH, or in the file that WISH_READY names."""
    path = os.environ.get("WISH_READY")
    if path is None:
        return json.loads(os.environ.get("WISH", "{}"))
    with open(path) as file:
        return json.load(file)


receive()
Sender(wish_of_ready()).send({"type": "ready", "version": 1})
while True:
    header, blobs = receive()
    if header["type"] == "shutdown":
        break
    if header["type"] == "ping":
        Sender({}).send({"type": "pong", "number": header["number"]})
    if header["type"] != "run":
        continue
    number = header["pass"]
    wish = json.loads(blobs[0])
    sender = Sender(wish, number)
    sender.send({"type": "progress", "pass": number, "item": 0, "fraction": 0.5})
    if wish.get("linger"):
        receive()
    while "until" in wish and not os.path.exists(wish["until"]):
        time.sleep(0.01)
    for index, blob in enumerate(blobs):
        sender.send({"type": "output", "pass": number, "item": index, "kind": "json"}, blob)
    sender.send({"type": "done", "pass": number, "peak": None})
    if wish.get("chatter"):
        connection.sendall(frame({"type": "done", "pass": number}))
    for _ in range(wish.get("late", 0)):
        connection.sendall(frame({"type": "progress", "pass": number, "item": 0, "fraction": 1}))
