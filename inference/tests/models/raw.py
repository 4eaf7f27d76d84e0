"""A model that speaks the protocol by hand, and wrongly where its first item asks for it:
{"die": N, "cut": BYTES}: die of SIGKILL instead of sending frame N of the pass, or after BYTES of it;
{"instead": N, "bytes": HEX} or {"instead": N, "header": {…}, "blob": TEXT}: send this instead of frame N."""

import json
import os
import signal
import socket
import struct

connection = socket.socket(fileno=int(os.environ["VRAMQ_FD"]))
reader = connection.makefile("rb")


def receive():
    (length,) = struct.unpack("<I", reader.read(4))
    header = json.loads(reader.read(length))
    return header, [reader.read(size) for size in header.pop("blobs", ())]


def frame(header, blob=None):
    if blob is not None:
        header = {**header, "blobs": [len(blob)]}
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + (blob or b"")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Sender:
    def __init__(self, wish):
        self.wish, self.count = wish, 0

    def send(self, data):
        if self.wish.get("die") == self.count:
            connection.sendall(data[:self.wish.get("cut", 0)])
            die()
        if self.wish.get("instead") == self.count:
            if "bytes" in self.wish:
                data = bytes.fromhex(self.wish["bytes"])
            else:
                blob = self.wish.get("blob")
                data = frame(self.wish["header"], None if blob is None else blob.encode())
        self.count += 1
        connection.sendall(data)


receive()
Sender(json.loads(os.environ.get("WISH", "{}"))).send(frame({"type": "ready", "version": 1}))
while True:
    header, blobs = receive()
    if header["type"] == "shutdown":
        break
    if header["type"] == "ping":
        connection.sendall(frame({"type": "pong", "number": header["number"]}))
    if header["type"] != "run":
        continue
    number = header["pass"]
    wish = json.loads(blobs[0])
    sender = Sender(wish)
    sender.send(frame({"type": "progress", "pass": number, "item": 0, "fraction": 0.5}))
    for index, blob in enumerate(blobs):
        sender.send(frame({"type": "output", "pass": number, "item": index, "kind": "json"}, blob))
    sender.send(frame({"type": "done", "pass": number, "peak": None}))
    if wish.get("chatter"):
        connection.sendall(frame({"type": "done", "pass": number}))
