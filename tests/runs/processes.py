"""A server and its sites as processes of their own, watched by what they say."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import atlas_fl

SECONDS = 240
"""Longest wait for a line or an end; only a fault waits for so long."""


class Programs:
    """Starts `atlas ...` in forks of one process that has imported everything."""

    def __init__(self) -> None:
        self._started = list["Program"]()
        source = str(Path(atlas_fl.__file__).parents[1])
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        )
        self._changed = threading.Condition()
        self._pids, self.codes = list[int](), dict[int, int]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            word, *numbers = line.split()
            with self._changed:
                if word == "pid":
                    self._pids.append(int(numbers[0]))
                elif word == "end":
                    self.codes[int(numbers[0])] = int(numbers[1])
                self._changed.notify_all()

    def start(self, *words: str, folder: Path, fault: str = "") -> "Program":
        """`atlas` with these words in this folder; with one of `faults.FAULTS`."""
        number = len(self._started)
        out = folder / f"out-{number}"
        os.mkfifo(out)
        program = Program(words, out, self)
        self._started.append(program)
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(
            json.dumps({"words": words, "out": str(out), "cwd": str(folder), "fault": fault}) + "\n"
        )
        self._zygote.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._pids) > number, timeout=SECONDS)
            program.pid = self._pids[number]
        return program

    def wait(self, pid: int) -> int:
        """The exit code of a process once it has ended; less than 0 for a signal."""
        with self._changed:
            assert self._changed.wait_for(lambda: pid in self.codes, timeout=SECONDS), f"{pid} does not end"
            return self.codes[pid]

    def kill_all(self) -> None:
        """Nothing is left running."""
        for program in self._started:
            if program.pid not in self.codes:
                program.kill()

    def close(self) -> None:
        """Nor is the process that all were forked from."""
        self.kill_all()
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait(timeout=SECONDS)
        self._reader.join(timeout=SECONDS)
        self._zygote.stdout.close()


class Watched:
    """A process, watched by what it says."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.lines = tuple(words), list[str]()
        self._changed, self._ended = threading.Condition(), False

    def _watch(self, lines: Iterable[str]) -> None:
        self._reader = threading.Thread(target=self._read, args=[lines], daemon=True)
        self._reader.start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def said(self, pattern: str) -> re.Match[str] | None:
        """The first line so far that holds this."""
        return next((found for line in self.lines if (found := re.search(pattern, line))), None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that holds this, as soon as it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self.said(pattern) or self._ended, timeout=SECONDS)
            found = self.said(pattern)
        assert found, f"{self.words[:2]} never said {pattern!r}:\n{self.text}"
        return found

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Program(Watched):
    """A program that was forked, which writes into a FIFO."""

    def __init__(self, words: Sequence[str], out: Path, programs: Programs) -> None:
        super().__init__(words)
        self.pid, self._out, self._programs = 0, out, programs
        self._watch(self._lines())

    def _lines(self) -> Iterator[str]:
        with self._out.open() as lines:
            yield from lines

    @property
    def ended(self) -> bool:
        """Whether nobody is left who could say anything."""
        return self._ended

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        os.kill(self.pid, signal.SIGKILL)
        self._programs.wait(self.pid)
        self._reader.join(timeout=SECONDS)

    def end(self, code: int = 0) -> str:
        """What it said, once it has ended with this code."""
        try:
            found = self._programs.wait(self.pid)
        except AssertionError as error:
            raise AssertionError(f"{self.words[:2]} does not end:\n{self.text}") from error
        self._reader.join(timeout=SECONDS)
        assert found == code, f"{self.words[:2]} ended with {found}:\n{self.text}"
        assert "Traceback" not in self.text
        return self.text
