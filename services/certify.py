"""Can this machine train, and does it train right? One command, a table of pass and fail, and a file to keep.

    python -m services.certify                with one GPU or a node of them; without, what a CPU can show in 5 minutes
    python -m services.certify --only machine kernels          some parts of it

    1 machine      what is here, what is wrong with it and its mend; how fast ranks add up
    2 kernels      beside their formulas; the host does not wait; an uneven all-to-all; documents of new lengths
    3 equality     fp64: rows of the tests' table beside one process, by their launch lines (tests/launches.py)
    4 precision    bf16: the same for each step's row, context modes and offload
    5 speed        MFU and memory beside what the dry run counts on this GPU (on a node also llama3-8b)
    6 recovery     a rank is killed: the job starts anew from its checkpoint, and goes on

It starts all ranks itself, by torchrun. (Under torchrun rank 0 does it, and the others leave.) Certificate and logs are
in --out: certificate.txt, certificate.json. What there is no time for is not certified, nor what is not here.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services import launch
from services.dry_run import GPUS
from services.machine import examine
from services.tables import human

ROOT = Path(__file__).parents[1]
LONGEST, LEAST = 600.0, 60.0  # seconds: a job that takes longer hangs; one that has begun may take as many


class Line(NamedTuple):
    """One line of the certificate. `passed` is None for what is not certified."""

    part: str
    what: str
    passed: bool | None
    found: str
    numbers: dict[str, float]


class Trial(NamedTuple):
    """A row of the tests' table, as it is launched, and one process that trains on the same sequences."""

    part: str
    what: str  # in a few words
    ranks: int
    line: str  # the script and its flags
    beside: str  # those of the one process
    numbers: list[str]  # of metrics.jsonl, that both have
    bound: float  # how far they may be apart, relatively


def trials(gpus: int) -> list[Trial]:
    """Parts 3 and 4 on such a machine: tests/launches.py says it. Nothing here imports a test."""
    command = [sys.executable, "-m", "tests.launches", str(gpus)]
    lines = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [Trial(**json.loads(line)) for line in lines]


def speeds(gpus: int) -> list[tuple[int, str, str]]:
    """Part 5: ranks, step, flags."""
    alone = "--model smollm-1.7b --dtype bf16 --global-batch-size 8 --micro-batch-size 4 --recompute full --steps 8"
    alone += " --loss-chunk 2048"
    rows = [(1, "step01_single_gpu", alone), (1, "step01_single_gpu", f"{alone} --compile")]
    if gpus >= 8:
        large = "--model llama3-8b --dtype bf16 --zero 3 --recompute full --steps 6 --micro-batch-size 1"
        large += " --loss-chunk 2048"
        rows += [(8, "step03_zero", f"{large} --global-batch-size 16")]
        rows += [
            (8, "step05_cp_ring", f"{large} --tp 2 --cp 4 --cp-kernel flash --seq-len 32768 --global-batch-size 2")
        ]
    return rows if gpus else []


def verdict(passed: bool | None) -> str:
    """As it is printed."""
    return {True: "pass", False: "FAIL", None: "  - "}[passed]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, as far as there are any."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def to_bytes(text: str) -> float:
    """The inverse of `human`."""
    number, unit = text.replace(",", "").split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


class Certificate:
    """Runs the parts, and keeps what they found."""

    def __init__(self, out: Path, minutes: float):
        self.out, self.lines, self.began, self.minutes = out, [], time.monotonic(), minutes
        self.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.train = lru_cache(self.train)  # what several are held beside runs once
        self.devices: list[str] = []  # first lines of runs
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def start(self, ranks: int, words: str) -> tuple[subprocess.Popen, Path]:
        """Start a command; its log. Raises TimeoutError if no time is left."""
        if self.left() < 0:
            raise TimeoutError
        log = self.out / f"log-{len(list(self.out.glob('log-*'))):02d}.txt"
        with open(log, "w") as file:
            file.write(f"{ranks} ranks: {words}\n")
            file.flush()
            return launch.start(ROOT, ranks, words.split(), stdout=file, stderr=file), log

    def job(self, ranks: int, words: str) -> Path:
        """Run a command to its end; its log. Raises RuntimeError if it fails or hangs, TimeoutError as `start`."""
        job, log = self.start(ranks, words)
        self.until(lambda: job.poll() is not None, job, log)
        if job.returncode:
            lines = log.read_text().splitlines()
            wrong = next((line for line in lines if "rror: " in line), lines[-1])
            raise RuntimeError(f"exit status {job.returncode}: {wrong.strip()[:90]} (see {log})")
        return log

    def until(self, done: Callable[[], bool], job: subprocess.Popen, log: Path):
        """Return when it is true. Else the job ends: RuntimeError if it hangs, TimeoutError if the time is over."""
        most, start = max(LEAST, self.left()), time.monotonic()
        try:
            while not done():
                seconds = time.monotonic() - start
                if seconds > LONGEST:
                    raise RuntimeError(f"it did not end in {LONGEST:g} s (see {log})")
                if seconds > most:
                    raise TimeoutError
                time.sleep(0.05)
        except BaseException:
            launch.stop(job)
            raise

    def train(self, ranks: int, line: str) -> list[dict[str, Any]]:
        """Train; the rows of metrics.jsonl."""
        out = self.out / f"run-{len(list(self.out.glob('run-*'))):02d}"
        log = self.job(ranks, f"{line} --out {out}")
        self.devices += [line for line in log.read_text().splitlines() if line.startswith("device: ")]
        return metrics(out)

    def note(self, part: str, what: str, passed: bool | None, found: str, **numbers: float):
        """One more line, which is also printed."""
        self.lines.append(Line(part, what, passed, found, numbers))
        print(f"{verdict(passed)}  {part:<10} {what}: {found}", flush=True)

    def attempt(self, part: str, what: str, check: Callable[[], tuple]):
        """`check()` returns (passed, found, numbers); an error is a failure, no time left is not certified."""
        try:
            passed, found, numbers = check()
        except TimeoutError:
            passed, found, numbers = None, f"the {self.minutes:g} minutes are over", {}
        except (RuntimeError, OSError, ValueError) as error:
            passed, found, numbers = False, str(error).splitlines()[0], {}
        self.note(part, what, passed, found, **numbers)

    def machine(self):
        """Part 1."""
        for finding in examine():
            wrong = f"; {finding.problem}: {finding.mend}" if finding.problem else ""
            self.note("machine", finding.what, not finding.problem, finding.found + wrong)
        n = max(2, min(8, self.gpus))

        def exchange() -> tuple:
            numbers = self.probe(n, "exchange")
            best = max(2 * (n - 1) / n * int(size) / seconds for size, seconds in numbers.items())
            return best > 5e7, f"up to {best / 1e9:.2f} GB/s; {numbers['1024'] * 1e6:.0f} us for 1 KiB", numbers

        self.attempt("machine", f"all-reduce, {n} ranks", exchange)

    def probe(self, ranks: int, name: str) -> dict[str, float]:
        """What a probe says."""
        log = self.job(ranks, f"-m services.probes {name}").read_text()
        return json.loads(next(line for line in log.splitlines() if line.startswith("{")))

    def kernels(self):
        """Part 2."""
        bounds = dict(attention=dict(output=0.06, lse=1e-3, gradients=0.06), grouped=dict(error=0.03))
        bounds |= dict(uneven=dict(wrong=0.5)) | (dict(documents={"new / known": 10.0}) if self.gpus else {})
        for name, most in bounds.items():

            def check(name: str = name, most: dict = most) -> tuple:
                numbers = self.probe(max(1, self.gpus) if name == "uneven" else 0, name)
                found = ", ".join(f"{key} {n:.3g}" for key, n in numbers.items())
                return all(numbers[key] < bound for key, bound in most.items()), found, numbers

            self.attempt("kernels", name, check)

    def beside(self, part: str, trials: list[Trial]):
        """Parts 3 and 4: numbers of two runs."""
        for one in (one for one in trials if one.part == part):

            def check(one: Trial = one) -> tuple:
                steps = zip(self.train(one.ranks, one.line), self.train(0, one.beside), strict=True)
                worst = max(abs(a[key] - b[key]) / abs(b[key]) for a, b in steps for key in one.numbers)
                return worst < one.bound, f"{worst:.1e} (below {one.bound:.1e})", dict(worst=worst, bound=one.bound)

            self.attempt(part, one.what, check)

    def rows(self, part: str):
        """Those of the tests' table; a copy for students has none."""
        if (ROOT / "tests" / "launches.py").exists():
            self.beside(part, trials(self.gpus))
        else:
            self.note(part, "rows of tests/rows.py", None, "there are no tests here")

    def equality(self):
        """Part 3."""
        self.rows("equality")
        lines = [line for line in self.devices if "no backend" not in line]
        wanted = "nccl" if self.gpus >= 4 else "staged" if self.gpus else "gloo"
        met = all(f"; backend {wanted}" in line for line in lines) if lines else None
        said = lines[-1].removeprefix("device: ") if lines else "no ranks met"
        self.note("equality", "devices and backend", met, said)

    def precision(self):
        """Part 4."""
        self.rows("precision")

    def speed(self):
        """Part 5. Steps after the third count: before, CUDA and --compile make things ready."""
        if not self.gpus:
            self.note("speed", "MFU and memory", None, "there is no GPU here")
        for ranks, step, flags in speeds(self.gpus):

            def check(ranks: int = ranks, step: str = step, flags: str = flags) -> tuple:
                name = torch.cuda.get_device_name(0).lower()
                gpu = next((key for key in GPUS if key.split("-")[0] in name), "h100-80")
                dry = f"{flags.replace('--compile', '')} --dry-run {ranks} --gpu {gpu}"
                said = self.job(0, f"{step}.py {dry}").read_text()
                most = float(said.split("MFU is at most ")[1].split("%")[0]) / 100
                line = next(line for line in said.splitlines() if line.startswith("at the peak of "))
                peak = to_bytes(line.removeprefix("at the peak of ").split(":")[0])
                line = f"{step}.py {flags} --eval-every 0 --save-every 0"
                if peak > 0.95 * torch.cuda.get_device_properties(0).total_memory:
                    return None, f"it takes {human(peak)}, which this GPU does not have", dict(counted=peak)
                rows = self.train(ranks if ranks > 1 else 0, line)[3:]
                mfu = sorted(row["mfu"] for row in rows)[len(rows) // 2]
                memory = max(row["peak_memory_bytes"] for row in rows)
                found = f"MFU {mfu:.1%} (roofline {most:.1%}), memory {human(memory)} (counted {human(peak)})"
                numbers = dict(mfu=mfu, roofline=most, memory=memory, counted=peak)
                return abs(memory / peak - 1) < 0.03 and mfu <= most, found, numbers

            self.attempt("speed", f"{ranks} x {step} {flags}", check)

    def recovery(self):
        """Part 6."""

        def check() -> tuple:
            out = self.out / "run-killed"
            words = "--max-restarts=1 step03_zero.py --model debug --steps 30 --save-every 5 --eval-every 0 --dim 32"
            words += " --n-heads 4 --zero 3 --resume auto"
            job, log = self.start(max(2, self.gpus), f"{words} --out {out}")
            self.until(lambda: len(metrics(out)) > 7 or job.poll() is not None, job, log)
            if job.poll() is not None:
                raise RuntimeError(f"it ended by itself (see {log})")
            os.kill(launch.children(job.pid)[-1], signal.SIGKILL)
            self.until(lambda: job.poll() is not None, job, log)
            went_on, done = "going on from" in log.read_text(), len(metrics(out))
            found = f"exit status {job.poll()}, {done} of 30 steps{', went on from a checkpoint' * went_on}"
            return job.poll() == 0 and done == 30 and went_on, found, {}

        self.attempt("recovery", "a rank is killed", check)

    def text(self) -> str:
        """The certificate."""
        passed, name = [line.passed for line in self.lines], torch.cuda.get_device_name(0) if self.gpus else "GPU"
        lines = [f"certificate of {time.strftime('%Y-%m-%d')}: {self.gpus} x {name}, torch {torch.__version__}", ""]
        lines += [f"{verdict(one.passed)}  {one.part:<10} {one.what}\n      {one.found}" for one in self.lines]
        counts = f"{passed.count(True)} passed, {passed.count(False)} failed, {passed.count(None)} not certified"
        return "\n".join([*lines, "", f"{counts}, in {time.monotonic() - self.began:.0f} s"])

    def keep(self):
        """Write the files."""
        (self.out / "certificate.txt").write_text(self.text() + "\n")
        about = dict(gpus=self.gpus, torch=torch.__version__, cuda=torch.version.cuda)
        about["rows"] = [line._asdict() for line in self.lines]
        (self.out / "certificate.json").write_text(json.dumps(about, indent=1))


PARTS = ("machine", "kernels", "equality", "precision", "speed", "recovery")


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 1 if something failed."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m services.certify", description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="runs/certificate", metavar="DIR", help="where certificate and logs go")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the list")
    parser.add_argument("--minutes", type=float, default=25.0 if gpu else 5.0, help="after which nothing more begins")
    args = parser.parse_args(argv)
    if int(os.environ.get("RANK", 0)):
        return 0
    if not gpu:
        print("no GPU here: what a CPU can show; speed, NCCL and CUDA's kernels are not certified", flush=True)
    certificate = Certificate(Path(args.out).resolve(), args.minutes)
    for part in args.only:
        getattr(certificate, part)()
        certificate.keep()  # also if a later part should not end
    print(certificate.text().splitlines()[-1], f"see {certificate.out}/certificate.txt", sep="; ")
    return int(any(line.passed is False for line in certificate.lines))


if __name__ == "__main__":
    sys.exit(main())
