"""Programs in processes of their own that have imported nothing but torch.

One process imports it, and each program is a fork of that: it spares each of them two seconds.
"""

import atexit
import functools
import json
import subprocess
import sys
from types import SimpleNamespace

SERVER = """
import json, os, sys, tempfile, torch

for line in sys.stdin:
    program, arguments = json.loads(line)
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate(files, start=1):
            os.dup2(file.fileno(), number)
        sys.argv = ["-c", *arguments]
        code = 0
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    returncode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    stdout, stderr = (file.read() for file in files)
    print(json.dumps({"returncode": returncode, "stdout": stdout, "stderr": stderr}), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(server.communicate)  # The end of what it reads is its own.
    return server


def run(program: str, *arguments: str) -> SimpleNamespace:
    """What `subprocess.run([sys.executable, "-c", program, *arguments])` captures."""
    server = _server()
    server.stdin.write(json.dumps([program, arguments]) + "\n")
    return SimpleNamespace(**json.loads(server.stdout.readline()))
