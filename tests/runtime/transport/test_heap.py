"""Freed memory stays with the process, where glibc would give it back."""

import platform
import subprocess
import sys

import pytest

_TURNS = """
import resource
from atlas_fl.runtime.transport.event_loop import keep_freed_memory
assert keep_freed_memory()
values = bytes(8_000_000)
def turn():
    return bytearray(memoryview(b"".join([b"head", values]))[4:])
turn(), turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, which alone can be asked")
def test_messages_lie_in_the_pages_of_those_before() -> None:
    done = subprocess.run([sys.executable, "-c", _TURNS], capture_output=True, check=True, text=True)
    pages_of_one = 8_000_000 // 4096
    assert int(done.stdout) < pages_of_one  # twenty messages, joined and copied, take forty times as many otherwise
