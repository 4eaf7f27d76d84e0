"""Check what came of eight items of pytorch_program.py, one JSON line each on standard input; print its process and its largest pass.

    check_program.py PROCESS

All ran in one process, which is not PROCESS, in passes that were halved.
"""

import json
import sys

before = int(sys.argv[1])
found = [json.loads(line)["json"] for line in sys.stdin]
processes = {output["pid"] for output in found}
sizes = [output["items"] for output in found]
if len(found) != 8 or len(processes) != 1 or max(sizes) >= 8 or before in processes:
    sys.exit(f"{found} after process {before}")
print(processes.pop(), max(sizes))
