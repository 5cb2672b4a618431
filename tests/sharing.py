"""The tests of many files in two processes: whoever is done with a file takes the next one.

Many tests use one core, or wait. So pytest starts a second pytest with the same arguments, the helper. Both collect all
tests; the first one keeps the list of files, and hands them out, the slow ones first. The helper's reports come back
through a pipe and are told to pytest's own hooks, as if its tests had run here.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

PIPE = "TESTS_HELPER_PIPE"  # in the helper's environment: the descriptor of its end
SLOW = ["test_gpu_paths", "test_checkpoint", "test_step06", "test_step07", "test_step05", "test_step03", "test_step01"]
SLOW += ["test_step04", "test_step07_5d"]


def by_file(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The selected tests by file, slow files first."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(str(item.path), []).append(item)
    rank = {name: number for number, name in enumerate(SLOW)}
    return dict(sorted(found.items(), key=lambda entry: rank.get(Path(entry[0]).stem, len(SLOW))))


def run_file(session: pytest.Session, items: list[pytest.Item], after: pytest.Item | None):
    """pytest's own loop, over one file. `after`: a test of another file; what both need (pools) is not torn down."""
    for item, following in zip(items, [*items[1:], after], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


class Files:
    """The files that nobody has taken yet."""

    def __init__(self, files: dict[str, list[pytest.Item]]):
        self.files, self.waiting, self.lock = files, list(files), threading.Lock()

    def take(self) -> str | None:
        """The next one."""
        with self.lock:
            return self.waiting.pop(0) if self.waiting else None

    def all_of_mine(self) -> Iterator[tuple[list[pytest.Item], pytest.Item | None]]:
        """(Tests of a file, a test of another one that waits) until none is left."""
        while (name := self.take()) is not None:
            others = self.waiting[:1]
            yield self.files[name], self.files[others[0]][0] if others else None


class Helper:
    """The second process, as the first one sees it; a thread hands out files and collects reports."""

    def __init__(self, config: pytest.Config, files: Files):
        self.config, self.files, self.reports = config, files, []
        self.ours, theirs = Pipe()
        self.log = tempfile.NamedTemporaryFile("w+", prefix="helper-", suffix=".log")  # noqa: SIM115
        words = [*map(str, config.invocation_params.args), "-p", "no:cacheprovider"]
        if config.getoption("basetemp"):
            words.append(f"--basetemp={config.getoption('basetemp')}-helper")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words],
            cwd=config.invocation_params.dir,
            env=os.environ | {PIPE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.complete = False
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self):
        """The thread: answer until the helper is done, or gone."""
        try:
            while (message := self.ours.recv()) != "done":
                if message == "next":
                    self.ours.send(self.files.take())
                else:
                    self.reports.append(message)
            self.complete = True
        except (EOFError, OSError):
            return

    def tell(self):
        """Hand the reports that have come to pytest's hooks."""
        while self.reports:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=self.reports.pop(0))
            if report.when == "setup":
                self.config.hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
            self.config.hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                self.config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def finish(self, session: pytest.Session):
        """Wait for the helper's last test. Raises if it is gone before that."""
        while self.thread.is_alive():
            self.thread.join(0.1)
            self.tell()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
        self.tell()
        if not self.complete and not session.shouldfail:
            text = Path(self.log.name).read_text()[-3000:]
            raise session.Failed(f"the helper process ended with {self.process.wait()}:\n{text}")

    def stop(self):
        """End it, whatever it does: its pools end with it."""
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Reporter:
    """In the helper: sends what the tests came to."""

    def __init__(self, config: pytest.Config, connection: Connection):
        self.config, self.connection = config, connection

    def pytest_runtest_logreport(self, report: Any):
        """pytest's hook."""
        self.connection.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def help_out(session: pytest.Session) -> bool:
    """The helper's loop: ask for files, run them."""
    connection, files = Connection(int(os.environ.pop(PIPE))), by_file(session.items)
    session.config.pluginmanager.register(Reporter(session.config, connection))
    anything = session.items[0]
    while True:
        connection.send("next")
        name = connection.recv()
        if name is None:
            break
        run_file(session, files[name], anything if str(anything.path) != name else session.items[-1])
    connection.send("done")
    return True


def run_shared(session: pytest.Session) -> bool | None:
    """In place of pytest's loop; None: pytest is to do it by itself (one file, a debugger, or --alone)."""
    if PIPE in os.environ:
        return help_out(session)
    files, option = by_file(session.items), session.config.option
    if len(files) < 2 or len(session.items) < 200 or option.collectonly or option.usepdb or option.alone:
        return None
    if session.testsfailed:
        return None
    shared = Files(files)
    helper = Helper(session.config, shared)
    try:
        for items, after in shared.all_of_mine():
            for part, following in zip(items, [*items[1:], after], strict=True):
                run_file(session, [part], following)
                helper.tell()
        helper.finish(session)
    finally:
        helper.stop()
    return True
