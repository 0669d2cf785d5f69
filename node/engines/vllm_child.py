"""Becomes the program it is told to start, after asking the kernel to end it when the node is gone.

Run by path and without imports of ours: `python vllm_child.py PARENT_PID PROGRAM ARGUMENT...`. A node that is killed
with SIGKILL can tidy nothing; without this its vLLM server would keep a whole GPU.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(sys.argv[1]):  # it died before we asked
            sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
