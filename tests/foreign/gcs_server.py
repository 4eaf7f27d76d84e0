"""Google Cloud Storage for tests: gcp-storage-emulator with one bucket, on a port of its own, which it prints. Ends with its input.

    .cache/stores/bin/python gcs_server.py BUCKET
"""

import sys

from gcp_storage_emulator.server import create_server

server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=sys.argv[1])
server.start()
print(server._api._httpd.server_port, flush=True)
sys.stdin.read()
server.stop()
